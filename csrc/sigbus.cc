// The handler may run at any instant on any thread, so all that it reads is atomic: a list of
// ranges that only grows, whose nodes are used again; and levels, one for each handler of somebody
// else's that was found on top of ours.
//
// A level is a handler function of its own, which passes on to the action that it was put on top
// of, for ever the same. So a handler that puts back what was there before it, and raises again
// (faulthandler does), reaches the level below its own and from there the action below that, and in
// the end the default: nobody is called twice.
#include "sigbus.h"

#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <new>
#include <utility>

namespace lightckpt {

struct SigbusRange {
  std::atomic<bool> used{true};
  std::atomic<uintptr_t> base{0};  // 0: guards nothing
  std::atomic<size_t> bytes{0};
  std::atomic<int> protection{0};
  std::atomic<int> fd{-1};
  std::atomic<uint64_t> trips{0};
  std::atomic<uint64_t> last{0};
  std::atomic<bool> cut{false};
  SigbusRange* next = nullptr;
};

namespace {

constexpr size_t kLevels = 16;
constexpr size_t kPlaces = 64;          // in which passed faults are counted
constexpr uint32_t kReturnsMax = 1000;  // of one fault in a row

std::atomic<SigbusRange*> ranges{nullptr};
std::array<std::atomic<const struct sigaction*>, kLevels> below{};
std::atomic<size_t> levels{0};
thread_local int armed_here = 0;
std::atomic<pid_t> arming{0};  // the process that changes them; a fork may leave it to a child

// How often whoever was passed a fault at this address has returned from it.
struct Returned {
  std::atomic<uintptr_t> address{0};
  std::atomic<uint32_t> times{0};
};
std::array<Returned, kPlaces> returned;

SigbusRange* find(uintptr_t address) {
  for (SigbusRange* range = ranges; range != nullptr; range = range->next) {
    const uintptr_t base = range->base;
    if (base == 0 || address < base || address - base >= range->bytes) continue;
    // Else the node has been given to another range between the two looks.
    if (range->base == base) return range;
  }
  return nullptr;
}

bool put_page(uintptr_t address, size_t page_bytes, int protection) {
  void* page = reinterpret_cast<void*>(address / page_bytes * page_bytes);
  return mmap(page, page_bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == page;
}

bool replace(uintptr_t address) {
  SigbusRange* range = find(address);
  if (range == nullptr) return false;
  struct stat file;
  const int fd = range->fd;
  if (fd >= 0 && (fstat(fd, &file) != 0 || static_cast<size_t>(file.st_size) < range->bytes)) {
    range->cut = true;
  }
  range->last = address - range->base;
  ++range->trips;
  const int protection = range->protection;
  // A mapping of huge pages can only be replaced a huge page at a time.
  const bool put = put_page(address, 4096, protection) || put_page(address, 2 << 20, protection);
  if (range->trips == 0) ++range->trips;  // forgotten by a recovery, before this page came
  return put;
}

void end_by_default(bool sent) {
  signal(SIGBUS, SIG_DFL);
  // A fault repeats itself when the handler returns.
  if (sent) raise(SIGBUS);
}

// Whoever returns from a fault and has mended nothing would meet it for ever.
bool returns_in_vain(uintptr_t address) {
  Returned& place = returned[(address >> 3) % kPlaces];
  if (place.address.exchange(address) != address) place.times = 0;
  return ++place.times > kReturnsMax;
}

void pass_on(const struct sigaction& action, int number, siginfo_t* info, void* context) {
  const bool sent = info->si_code <= 0;  // by kill or raise
  if (action.sa_handler == SIG_IGN && sent) return;
  if (action.sa_handler == SIG_DFL || action.sa_handler == SIG_IGN) return end_by_default(sent);
  if (action.sa_flags & SA_SIGINFO) {
    action.sa_sigaction(number, info, context);
  } else {
    action.sa_handler(number);
  }
  if (!sent && returns_in_vain(reinterpret_cast<uintptr_t>(info->si_addr))) end_by_default(false);
}

// A handler that calls the one that it found, and was set again over ours, would be called by
// itself for ever: in calls alone, so with the same context and deeper in the stack.
struct Passed {
  std::atomic<const void*> context{nullptr};
  std::atomic<uintptr_t> frame{0};
};
std::array<Passed, kLevels> passed;

bool calls_itself(size_t level, const void* context) {
  const auto frame = reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
  Passed& last = passed[level];
  const uintptr_t before = last.frame.exchange(frame);
  return last.context.exchange(context) == context && frame < before;
}

template <size_t level>
void handle(int number, siginfo_t* info, void* context) {
  const int saved_errno = errno;
  // What was sent has no address.
  const bool ours = info->si_code > 0 && replace(reinterpret_cast<uintptr_t>(info->si_addr));
  if (!ours && calls_itself(level, context)) {
    end_by_default(info->si_code <= 0);
  } else if (!ours) {
    pass_on(*below[level].load(), number, info, context);
    passed[level].context = nullptr;
  }
  errno = saved_errno;
}

using Handler = void (*)(int, siginfo_t*, void*);
template <size_t... level>
constexpr std::array<Handler, kLevels> handlers_of(std::index_sequence<level...>) {
  return {handle<level>...};
}
constexpr std::array<Handler, kLevels> handlers = handlers_of(std::make_index_sequence<kLevels>());

bool is_ours(const struct sigaction& action) {
  if (!(action.sa_flags & SA_SIGINFO)) return false;
  for (Handler handler : handlers) {
    if (action.sa_sigaction == handler) return true;
  }
  return false;
}

bool is_same(const struct sigaction& a, const struct sigaction& b) {
  return a.sa_handler == b.sa_handler && (a.sa_flags & SA_SIGINFO) == (b.sa_flags & SA_SIGINFO);
}

// The level above this action: the one that was made for it, or a new one. The last level serves
// whatever there is no other for.
size_t level_above(const struct sigaction& action) {
  const size_t count = levels;
  for (size_t level = 0; level < count; ++level) {
    if (is_same(*below[level].load(), action)) return level;
  }
  const size_t level = count < kLevels ? count : kLevels - 1;
  auto* kept =
      new (std::nothrow) struct sigaction(action);  // for ever: a handler may be reading one
  if (kept == nullptr) return kLevels;
  below[level] = kept;
  if (count < kLevels) levels = count + 1;
  return level;
}

void put_on_top() {
  struct sigaction found;
  sigaction(SIGBUS, nullptr, &found);
  for (size_t tries = 0; tries < kLevels && !is_ours(found); ++tries) {
    const size_t level = level_above(found);
    if (level == kLevels) return;  // no memory: tried again at the next look
    struct sigaction action = {};
    action.sa_sigaction = handlers[level];
    action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    struct sigaction replaced;
    sigaction(SIGBUS, &action, &replaced);
    if (is_same(replaced, found)) return;
    found = replaced;  // somebody's who came between the two calls: ours goes above that as well
  }
}

SigbusRange* take() {
  for (SigbusRange* range = ranges; range != nullptr; range = range->next) {
    bool expected = false;
    if (range->used.compare_exchange_strong(expected, true)) return range;
  }
  auto* range = new SigbusRange;  // for ever: a handler may be looking at it
  range->next = ranges;
  while (!ranges.compare_exchange_weak(range->next, range)) continue;
  return range;
}

// What is mapped elsewhere cannot be mapped here too: such a range came by fork, and its mapping
// did not.
void forget_inherited(const SigbusRange* mine, uintptr_t base, size_t bytes) {
  for (SigbusRange* range = ranges; range != nullptr; range = range->next) {
    const uintptr_t other = range->base;
    if (range == mine || other == 0) continue;
    if (other < base + bytes && base < other + range->bytes) range->base = 0;
  }
}

}  // namespace

SigbusGuard::Armed::Armed() {
  arm();
  ++armed_here;
}

SigbusGuard::Armed::~Armed() { --armed_here; }

void SigbusGuard::arm() {
  if (armed_here > 0 || ranges.load() == nullptr) return;
  struct sigaction top;
  sigaction(SIGBUS, nullptr, &top);
  if (is_ours(top)) return;
  // No mutex: a child that was forked meanwhile would find it locked for ever.
  const pid_t self = getpid();
  for (pid_t holder = 0; !arming.compare_exchange_strong(holder, self);) {
    if (holder == self) {
      holder = 0;
      sched_yield();
    }
  }
  put_on_top();
  arming = 0;
}

void SigbusGuard::protect(void* base, size_t bytes, int protection, int fd) {
  const bool anew = range_ == nullptr;
  if (anew) range_ = take();
  forget_inherited(range_, reinterpret_cast<uintptr_t>(base), bytes);
  range_->bytes = bytes;
  if (anew) {
    range_->protection = protection;
    range_->fd = fd;
    range_->trips = 0;
    range_->cut = false;
    range_->base = reinterpret_cast<uintptr_t>(base);
  }
  arm();
}

void SigbusGuard::release() {
  if (range_ == nullptr) return;
  range_->base = 0;
  range_->used = false;
  range_ = nullptr;
}

uint64_t SigbusGuard::trips() const { return range_ == nullptr ? 0 : range_->trips.load(); }
bool SigbusGuard::was_cut() const { return range_ != nullptr && range_->cut; }
uint64_t SigbusGuard::last_trip() const { return range_ == nullptr ? 0 : range_->last.load(); }

void SigbusGuard::forget() {
  if (range_ != nullptr) range_->trips = 0;
}

void SigbusGuard::trip() {
  if (range_ != nullptr) ++range_->trips;
}

}  // namespace lightckpt
