// SigbusGuard: a file cut short or a failing device under a mapping becomes an error, not a death.
//
// Touching a mapped page that the file no longer has raises SIGBUS. For an address in a guarded
// range the handler puts an anonymous page there, remembers that it did, and lets execution go on;
// whoever uses the bytes must ask tripped() before trusting them. Any other address goes to the
// handler that was there before. This file owns the process's SIGBUS handler, the only signal
// that the core touches.
#pragma once

#include <cstddef>

namespace lightckpt {

class SigbusGuard {
 public:
  SigbusGuard() = default;
  SigbusGuard(const SigbusGuard&) = delete;
  SigbusGuard& operator=(const SigbusGuard&) = delete;
  ~SigbusGuard() { release(); }

  // Guards [base, base + bytes); again with more bytes, all the time and with what was tripped.
  // False when all places are taken (64 mappings in one process).
  bool protect(void* base, size_t bytes, int protection);
  void release();

  // Has a page of the range been replaced since protect()?
  bool tripped() const;

 private:
  int index_ = -1;
};

}  // namespace lightckpt
