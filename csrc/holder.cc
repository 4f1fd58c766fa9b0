// What /proc says of this process, and of the one that a token names. See holder.h.
#include "holder.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstddef>
#include <fstream>
#include <optional>
#include <sstream>

#include "crc32c.h"

namespace lightckpt {
namespace {

constexpr int kStartField = 22;  // of /proc/PID/stat, counted from 1

std::array<uint8_t, 16> boot_id() {
  std::array<uint8_t, 16> boot = {};
  std::string text;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> text;
  std::erase(text, '-');
  if (text.size() != 2 * boot.size()) return boot;
  for (size_t i = 0; i < boot.size(); ++i) {
    boot[i] = static_cast<uint8_t>(std::strtoul(text.substr(2 * i, 2).c_str(), nullptr, 16));
  }
  return boot;
}

uint64_t pid_namespace() {
  struct stat file = {};
  return stat("/proc/self/ns/pid", &file) == 0 ? file.st_ino : 0;
}

// Nothing where /proc has no such process; 0 for one that only waits to be reaped.
std::optional<uint64_t> start_ticks_of(const std::string& pid) {
  std::ifstream file("/proc/" + pid + "/stat");
  std::stringstream text;
  text << file.rdbuf();
  const std::string all = text.str();
  const size_t name_end = all.rfind(')');  // the name may hold anything, parentheses too
  if (name_end == std::string::npos) return std::nullopt;
  std::istringstream fields(all.substr(name_end + 1));
  std::string state, skipped;
  fields >> state;
  for (int field = 4; field < kStartField; ++field) fields >> skipped;
  uint64_t ticks = 0;
  fields >> ticks;
  return state == "Z" || state == "X" ? 0 : ticks;
}

// Is /proc that of this process's own PID namespace? In a container it may be the host's.
bool proc_is_ours() {
  char self[32] = {};
  return readlink("/proc/self", self, sizeof(self) - 1) > 0 && std::to_string(getpid()) == self;
}

uint32_t crc_of(const Token& token) { return crc32c(0, &token, offsetof(Token, crc)); }

}  // namespace

Status make_token(uint64_t inode, Token* token) {
  *token = {};
  if (getrandom(&token->nonce, sizeof(token->nonce), 0) != sizeof(token->nonce)) {
    return from_errno("getrandom");
  }
  token->nonce |= 1;
  token->pid = static_cast<uint64_t>(getpid());
  token->start_ticks = start_ticks_of("self").value_or(0);
  token->boot = boot_id();
  token->pid_namespace = pid_namespace();
  token->inode = inode;
  token->crc = crc_of(*token);
  return {};
}

Holder holder_of(const Token& token, uint64_t inode) {
  if (token.nonce == 0 || token.crc != crc_of(token) || token.inode != inode) {
    return Holder::kUnknown;
  }
  const std::array<uint8_t, 16> unknown = {};
  if (token.boot == unknown || token.boot != boot_id() || token.pid_namespace == 0 ||
      token.pid_namespace != pid_namespace() || token.start_ticks == 0 || !proc_is_ours()) {
    return Holder::kElsewhere;
  }
  const auto start_ticks = start_ticks_of(std::to_string(token.pid));
  // Other users' processes may be hidden in /proc.
  if (!start_ticks && (kill(static_cast<pid_t>(token.pid), 0) == 0 || errno != ESRCH)) {
    return Holder::kElsewhere;
  }
  return start_ticks == token.start_ticks ? Holder::kLives : Holder::kEnded;
}

bool is_of_this_boot(const Token& token) {
  return token.boot != std::array<uint8_t, 16>{} && token.boot == boot_id();
}

std::string words_of(const Token& token, uint64_t inode) {
  const std::string pid = std::to_string(token.pid);
  switch (holder_of(token, inode)) {
    case Holder::kLives:
      if (token.pid == static_cast<uint64_t>(getpid())) return "this process (pid " + pid + ")";
      return "process " + pid;
    case Holder::kEnded:
      return "a child of process " + pid + ", which has ended";
    case Holder::kElsewhere:
      return "a process that is not seen from here: of another container, machine or user";
    default:
      return "another process, which has not said which it is";
  }
}

bool may_be_lock_file(const std::string& path, const struct stat& file) {
  if (file.st_size == 0) return true;
  Token token;
  if (file.st_size != sizeof(token)) return false;
  const int fd = ::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0) return false;
  const bool whole = pread(fd, &token, sizeof(token), 0) == ssize_t{sizeof(token)};
  close(fd);
  return whole && token.nonce != 0 && token.crc == crc_of(token);
}

void sign_lock_file(int descriptor) {
  struct stat file = {};
  Token token;
  if (fstat(descriptor, &file) != 0 || !make_token(file.st_ino, &token).ok()) return;
  (void)!pwrite(descriptor, &token, sizeof(token), 0);
}

Holder holder_of_lock_file(const std::string& path, Token* token, uint64_t* inode) {
  struct stat file = {};
  const int fd = ::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0) return Holder::kUnknown;
  const bool whole = fstat(fd, &file) == 0 && S_ISREG(file.st_mode) &&
                     pread(fd, token, sizeof(*token), 0) == ssize_t{sizeof(*token)};
  close(fd);
  *inode = file.st_ino;
  return whole ? holder_of(*token, *inode) : Holder::kUnknown;
}

}  // namespace lightckpt
