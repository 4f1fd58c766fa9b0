// The handler may run at any instant on any thread, so the table is fixed in size and all atomics:
// a place is taken by setting `used`, and visible to the handler once `base` is not null.
#include "sigbus.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <mutex>

namespace lightckpt {
namespace {

struct Place {
  std::atomic<bool> used{false};
  std::atomic<uintptr_t> base{0};
  std::atomic<size_t> bytes{0};
  std::atomic<int> protection{0};
  std::atomic<bool> tripped{false};
};

std::array<Place, 64> places;
struct sigaction previous_action;
std::once_flag installed;

bool replace_page(uintptr_t address, size_t page_bytes, int protection) {
  void* page = reinterpret_cast<void*>(address / page_bytes * page_bytes);
  return mmap(page, page_bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == page;
}

void pass_on(int signal_number, siginfo_t* info, void* context) {
  if (previous_action.sa_flags & SA_SIGINFO) {
    previous_action.sa_sigaction(signal_number, info, context);
  } else if (previous_action.sa_handler == SIG_DFL || previous_action.sa_handler == SIG_IGN) {
    // Returning with the default action set repeats the access and ends the process, as it should.
    signal(signal_number, SIG_DFL);
  } else {
    previous_action.sa_handler(signal_number);
  }
}

void handle(int signal_number, siginfo_t* info, void* context) {
  const int saved_errno = errno;
  const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  for (Place& place : places) {
    const uintptr_t base = place.base.load();
    if (base == 0 || address < base || address - base >= place.bytes.load()) continue;
    place.tripped.store(true);
    const int protection = place.protection.load();
    // A mapping of huge pages can only be replaced a huge page at a time.
    if (replace_page(address, 4096, protection) || replace_page(address, 2 << 20, protection)) {
      errno = saved_errno;
      return;
    }
  }
  pass_on(signal_number, info, context);
  errno = saved_errno;
}

void install() {
  struct sigaction action = {};
  action.sa_sigaction = handle;
  action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  sigaction(SIGBUS, &action, &previous_action);
}

}  // namespace

bool SigbusGuard::protect(void* base, size_t bytes, int protection) {
  std::call_once(installed, install);
  if (index_ >= 0) {
    places[index_].bytes = bytes;
    return true;
  }
  for (size_t i = 0; i < places.size(); ++i) {
    bool expected = false;
    if (!places[i].used.compare_exchange_strong(expected, true)) continue;
    places[i].bytes = bytes;
    places[i].protection = protection;
    places[i].tripped = false;
    places[i].base = reinterpret_cast<uintptr_t>(base);
    index_ = static_cast<int>(i);
    return true;
  }
  return false;
}

void SigbusGuard::release() {
  if (index_ < 0) return;
  places[index_].base = 0;
  places[index_].used = false;
  index_ = -1;
}

bool SigbusGuard::tripped() const { return index_ >= 0 && places[index_].tripped.load(); }

}  // namespace lightckpt
