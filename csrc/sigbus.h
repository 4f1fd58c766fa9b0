// SigbusGuard: a file cut short or a failing device under a mapping becomes an error, not a death.
//
// Touching a mapped page that the file cannot give raises SIGBUS. For an address in a guarded range
// the handler puts an anonymous page there, remembers that it did, and lets execution go on;
// whoever uses the bytes must ask trips() before trusting them. Any other SIGBUS goes to the
// handler that was there before. This file owns the process's SIGBUS handler, the only signal that
// the core touches.
//
// Others set one too, and later: faulthandler, crash reporters, signal.signal. So whoever is about
// to touch a mapping calls arm(), which puts ours on top again if it is not. Who takes the handler
// between that and the touch takes the guard away.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lightckpt {

struct SigbusRange;

class SigbusGuard {
 public:
  SigbusGuard() = default;
  SigbusGuard(const SigbusGuard&) = delete;
  SigbusGuard& operator=(const SigbusGuard&) = delete;
  ~SigbusGuard() { release(); }

  // Guards [base, base + bytes), a mapping of the start of `fd`; again with more bytes, all the
  // time and with what was tripped. The descriptor stays open until release.
  void protect(void* base, size_t bytes, int protection, int fd);
  void release();

  // How many pages of the range have been replaced since protect() or forget().
  uint64_t trips() const;
  // Was the file shorter than the range when that happened? This is never forgotten.
  bool was_cut() const;
  // Where in the range the last of them is.
  uint64_t last_trip() const;
  void forget();
  // As if a page had been replaced.
  void trip();

  // Puts the handler on top, wherever one is guarded. A system call, if there is nothing to do.
  static void arm();

  // Arms once for all that this thread does while it lives: for work in small parts.
  class Armed {
   public:
    Armed();
    Armed(const Armed&) = delete;
    Armed& operator=(const Armed&) = delete;
    ~Armed();
  };

 private:
  SigbusRange* range_ = nullptr;
};

}  // namespace lightckpt
