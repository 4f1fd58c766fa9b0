// Signals are the trainer's business: a thread of ours takes none, but those that a fault of its
// own raises, which must still reach their handler.
#pragma once

#include <pthread.h>
#include <signal.h>

namespace lightckpt {

// First thing on a thread.
inline void block_signals() {
  sigset_t signals;
  sigfillset(&signals);
  for (int fault : {SIGBUS, SIGSEGV, SIGFPE, SIGILL, SIGABRT}) sigdelset(&signals, fault);
  pthread_sigmask(SIG_SETMASK, &signals, nullptr);
}

}  // namespace lightckpt
