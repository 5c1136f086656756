// Blocks signals in the threads of this library.
#pragma once
#include <pthread.h>

#include <csignal>

namespace kt::sys {

class SignalsBlocked {  // for threads created during its lifetime
 public:
  SignalsBlocked() {
    sigset_t set;
    sigfillset(&set);
    // Faults are raised in the thread itself; if blocked, they would kill without a traceback.
    for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS}) {
      sigdelset(&set, fault);
    }
    pthread_sigmask(SIG_BLOCK, &set, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace kt::sys
