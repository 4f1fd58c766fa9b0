// Room on a file system, taken ahead: later stores through a mapping must find their blocks there.
#pragma once

#include <cstdint>
#include <string>

namespace lightckpt {

// How a file system may go about it. kReal: blocks, or EOPNOTSUPP. kAny: where it cannot allocate,
// zeros are written, which only suits a range that holds nothing yet.
enum class Allocation { kReal, kAny };

// Returns 0 or an errno; what was allocated before an error stays. Signals do not interrupt it, and
// wait for as long as a piece of it takes.
int allocate_in_pieces(int fd, Allocation kind, uint64_t from, uint64_t to);

// Is there certainly too little room for so many bytes more? To fill a file system until it says so
// would take the room from everybody else, and where that is memory, end processes.
bool is_beyond(int fd, uint64_t bytes);

// What this user may still take of the file's file system; false where that is not known.
bool free_space(int fd, uint64_t* bytes);

// "8192 bytes (0 MiB)", for messages.
std::string mib(uint64_t bytes);

}  // namespace lightckpt
