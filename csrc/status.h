// Status: the one way the core reports an operating error.
//
// An operating error is one the machine may produce (full media, failed sync) and is returned. A
// broken invariant is a bug in this library and stops the process (CHECK), in every build: a
// checkpoint written by code that is already wrong is worth less than no checkpoint.
#pragma once

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>

namespace lightckpt {

enum class Code : int {
  kOk = 0,
  kInvalid = -1,
  kIo = -2,  // this call failed; the media may serve the next
  kNotFound = -3,
  kNoSpace = -4,
  kBusy = -5,
  kFormat = -6,
  kTimeout = -7,
  kChanged = -8,
  kAccess = -9,
  kLost = -10,  // the media is gone for good, and says so itself: nothing will be committed
};

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  Code code_ = Code::kOk;
  std::string message_;
};

// Where an exception ends that nobody could catch otherwise, on a thread of ours. So short that the
// message itself takes no memory.
inline Status no_host_memory() { return {Code::kNoSpace, "no host memory"}; }

// The status of a failed system call: `what` it was doing, and errno in words.
inline Status from_errno(const std::string& what, int error = errno) {
  Code code = Code::kIo;
  if (error == ENOENT || error == ENOTDIR) code = Code::kNotFound;
  if (error == ENOSPC || error == EDQUOT || error == ENOMEM || error == EFBIG) {
    code = Code::kNoSpace;
  }
  if (error == EACCES || error == EPERM || error == EROFS) code = Code::kAccess;
  if (error == EISDIR || error == EINVAL || error == ENAMETOOLONG) code = Code::kInvalid;
  return {code, what + ": " + std::strerror(error)};
}

// Calls again for as long as a signal interrupts it; not for close, whose descriptor is gone by
// then.
template <typename Call>
auto uninterrupted(Call call) {
  auto result = call();
  while (result == -1 && errno == EINTR) result = call();
  return result;
}

}  // namespace lightckpt

#define CHECK(condition)                                                                     \
  do {                                                                                       \
    if (!(condition)) {                                                                      \
      std::fprintf(stderr, "%s:%d: broken invariant: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                          \
    }                                                                                        \
  } while (false)

#define RETURN_IF_ERROR(expression)                                 \
  do {                                                              \
    if (::lightckpt::Status s_ = (expression); !s_.ok()) return s_; \
  } while (false)
