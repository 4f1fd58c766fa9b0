// Faults where the core meets libc, for LD_PRELOAD: calls that fail, and a clock that jumps.
//
//   FAULT_MSYNC=n, FAULT_FSYNC=n   the first n calls succeed, every later one fails with EIO
//   FAULT_RENAMEAT2=n              the same with EINVAL, as file systems have it without its flags
//   FAULT_CLOCK=1                  the wall clock is ten years ahead and ten years behind in turns
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static int fails(const char* name, atomic_long* calls, int error) {
  const char* limit = getenv(name);
  if (limit == NULL || atomic_fetch_add(calls, 1) < atol(limit)) return 0;
  errno = error;
  return 1;
}

int msync(void* memory, size_t bytes, int flags) {
  static atomic_long calls;
  if (fails("FAULT_MSYNC", &calls, EIO)) return -1;
  int (*real)(void*, size_t, int) = (int (*)(void*, size_t, int))dlsym(RTLD_NEXT, "msync");
  return real(memory, bytes, flags);
}

int fsync(int fd) {
  static atomic_long calls;
  if (fails("FAULT_FSYNC", &calls, EIO)) return -1;
  int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
  return real(fd);
}

int renameat2(int from_folder, const char* from, int to_folder, const char* to, unsigned flags) {
  static atomic_long calls;
  if (fails("FAULT_RENAMEAT2", &calls, EINVAL)) return -1;
  int (*real)(int, const char*, int, const char*, unsigned) =
      (int (*)(int, const char*, int, const char*, unsigned))dlsym(RTLD_NEXT, "renameat2");
  return real(from_folder, from, to_folder, to, flags);
}

static time_t jump(void) {
  static atomic_long calls;
  if (getenv("FAULT_CLOCK") == NULL) return 0;
  return (atomic_fetch_add(&calls, 1) % 2 == 0 ? 1 : -1) * (time_t)10 * 365 * 86400;
}

int clock_gettime(clockid_t clock, struct timespec* now) {
  int (*real)(clockid_t, struct timespec*) =
      (int (*)(clockid_t, struct timespec*))dlsym(RTLD_NEXT, "clock_gettime");
  const int result = real(clock, now);
  if (result == 0 && clock == CLOCK_REALTIME) now->tv_sec += jump();
  return result;
}

int gettimeofday(struct timeval* restrict now, void* restrict zone) {
  struct timespec fine;
  (void)zone;
  if (clock_gettime(CLOCK_REALTIME, &fine) != 0) return -1;
  now->tv_sec = fine.tv_sec;
  now->tv_usec = fine.tv_nsec / 1000;
  return 0;
}

time_t time(time_t* out) {
  struct timespec fine;
  if (clock_gettime(CLOCK_REALTIME, &fine) != 0) return -1;
  if (out != NULL) *out = fine.tv_sec;
  return fine.tv_sec;
}
