// Pmem2: what libpmem2 knows of a media and the kernel does not say in one place: bad blocks, and
// the count of unsafe shutdowns.
//
// The library is opened at run time, if it is there: nothing of PMDK is needed to build, and all
// that lightckpt promises holds without it. The declarations are those of libpmem2(7) that PMDK
// 1.12 to 2.1 share. Threads: any.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "status.h"

namespace lightckpt {

inline constexpr char kPmem2Library[] = "libpmem2.so.1";

// Where a file or device cannot be read, from its start.
struct BadBlock {
  uint64_t offset;
  uint64_t bytes;
};

// "4096 to 8192, 65536 to 66048 and 3 more": where they are, for a message.
std::string words_of(const std::vector<BadBlock>& blocks);

struct Pmem2Calls;  // the library's functions

class Pmem2 {
 public:
  // The library, opened at the first call and never closed. kNotFound: it is not there, or lacks a
  // function; the message says what to install.
  static Status load(const Pmem2** library);
  // The same for a library of another name.
  static Status load(const char* name, std::unique_ptr<Pmem2>* library);
  ~Pmem2();

  // Each says of an open file or device DAX node; not ok where there is nothing to say, as on what
  // is no persistent memory, or where this user may not look.
  Status bad_blocks(int fd, std::vector<BadBlock>* found) const;
  // How often the device lost power before it had written what it held.
  Status unsafe_shutdowns(int fd, uint64_t* count) const;

 private:
  struct Source;
  explicit Pmem2(std::unique_ptr<Pmem2Calls> calls);
  Status failure(const std::string& what, int error) const;

  std::unique_ptr<Pmem2Calls> calls_;
};

}  // namespace lightckpt
