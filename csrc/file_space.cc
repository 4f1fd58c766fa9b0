// Allocating in pieces, beside signals. See file_space.h.
#include "file_space.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/statvfs.h>

#include <algorithm>

#include "status.h"

namespace lightckpt {
namespace {

constexpr uint64_t kPiece = 64ull << 20;

// Signals are held back for as long as a piece takes: a call that any of them interrupts, and that
// begins anew each time, would never end under a timer that is quicker.
class SignalsHeldBack {
 public:
  SignalsHeldBack() {
    sigset_t all;
    sigfillset(&all);
    for (int fault : {SIGBUS, SIGSEGV, SIGFPE, SIGILL, SIGABRT}) sigdelset(&all, fault);
    pthread_sigmask(SIG_BLOCK, &all, &before_);
  }
  ~SignalsHeldBack() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

int allocate_piece(int fd, Allocation kind, off_t offset, off_t bytes) {
  const SignalsHeldBack held_back;
  if (kind == Allocation::kAny) return posix_fallocate(fd, offset, bytes);
  return fallocate(fd, 0, offset, bytes) == 0 ? 0 : errno;
}

}  // namespace

int allocate_in_pieces(int fd, Allocation kind, uint64_t from, uint64_t to) {
  int error = 0;
  for (uint64_t at = from; at < to && error == 0; at += kPiece) {
    const auto bytes = static_cast<off_t>(std::min(kPiece, to - at));
    do {
      error = allocate_piece(fd, kind, static_cast<off_t>(at), bytes);
    } while (error == EINTR);
  }
  return error;
}

bool is_beyond(int fd, uint64_t bytes) {
  struct statvfs volume = {};
  if (uninterrupted([&] { return fstatvfs(fd, &volume); }) != 0 || volume.f_blocks == 0)
    return false;
  // All that is free, what is set aside for root too: a superuser may take it.
  return bytes / volume.f_frsize > volume.f_bfree;
}

bool free_space(int fd, uint64_t* bytes) {
  struct statvfs volume = {};
  if (uninterrupted([&] { return fstatvfs(fd, &volume); }) != 0) return false;
  if (volume.f_blocks == 0) return false;  // without a limit, and so without a count
  *bytes = uint64_t{volume.f_bavail} * volume.f_frsize;
  return true;
}

std::string mib(uint64_t bytes) {
  return std::to_string(bytes) + " bytes (" + std::to_string(bytes >> 20) + " MiB)";
}

}  // namespace lightckpt
