// Holder: which process has a store open for writing, as that process says in the store itself.
//
// A lock of an open file description names nobody. So a writer writes this token behind the header
// when it opens the store: by plain stores into the shared mapping, with no drain, since it speaks
// to processes that live now, and a crash ends them all. It is believed as far as it fits: one of
// another boot or PID namespace, or of a process that is no more, names nobody. What a foreign or
// an older program left there is no token: its checksum is wrong, or it is zeros.
//
// The same token stands at the start of the lock file, for the time before the store is there.
//
// The nonce is another in each opening. A writer whose token is gone knows that another writer has
// taken the store over, even where no lock could tell (a device node that was made twice).
#pragma once

#include <sys/stat.h>
#include <sys/types.h>

#include <array>
#include <cstdint>
#include <string>

#include "status.h"

namespace lightckpt {

inline constexpr uint64_t kTokenOffset = 64;  // from the start of the store

struct Token {
  uint64_t nonce;  // random, never 0
  uint64_t pid;
  uint64_t start_ticks;          // when that process started: field 22 of /proc/PID/stat
  std::array<uint8_t, 16> boot;  // the kernel's boot_id; zeros where it is not known
  uint64_t pid_namespace;        // its inode; 0 where it is not known
  uint64_t inode;                // of the file that it stands in: a copy of that is held by nobody
  uint32_t zero;
  uint32_t crc;
};
static_assert(sizeof(Token) == 64, "one cache line");

enum class Holder {
  kUnknown,    // there is no token
  kLives,      // the process that the token names runs
  kEnded,      // it does not, and it was one that this process could see
  kElsewhere,  // it was of another boot or PID namespace, or is hidden from this one
};

// This process's token for a file that has this inode.
Status make_token(uint64_t inode, Token* token);
Holder holder_of(const Token& token, uint64_t inode);
// Was it written since this machine started? A process of that may be running still.
bool is_of_this_boot(const Token& token);
// Who holds the store, to end a sentence with: "process 17".
std::string words_of(const Token& token, uint64_t inode);

// Puts this process's token at the start of an open lock file, or reads the one that stands there.
// As far as that can be done: a message is all that depends on it.
void sign_lock_file(int descriptor);
// May the file be one that was made to be a lock file? Those are empty, or a token.
bool may_be_lock_file(const std::string& path, const struct stat& file);
Holder holder_of_lock_file(const std::string& path, Token* token, uint64_t* inode);

}  // namespace lightckpt
