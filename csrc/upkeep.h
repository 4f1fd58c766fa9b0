// Upkeep: a thread for what CUDA may take its time with. To register memory, to allocate some or to
// give it back can take seconds, or as long as the device has work; and no such call can be ended.
// Here a caller waits for one only until his deadline, and goes on without what it was to bring.
//
// Threads: any; the end by one alone.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <thread>

#include "deadline.h"
#include "thread_annotations.h"

namespace lightckpt {

class Upkeep {
 public:
  Upkeep();
  Upkeep(const Upkeep&) = delete;
  Upkeep& operator=(const Upkeep&) = delete;
  // Waits for the job that is being done, as long as it takes; those behind it are left out.
  ~Upkeep();

  // Has the job done, behind those before it; true if it was, by the deadline. Else it will be, and
  // what it needs must stay until then. A job throws nothing.
  bool run(std::function<void()> job, const Deadline& deadline);

 private:
  void work();
  bool take(std::function<void()>* job);

  Mutex mutex_;
  CondVar has_job_;
  CondVar has_done_;
  std::deque<std::function<void()>> jobs_ GUARDED_BY(mutex_);
  uint64_t asked_ GUARDED_BY(mutex_) = 0;
  uint64_t done_ GUARDED_BY(mutex_) = 0;
  bool ending_ GUARDED_BY(mutex_) = false;
  std::thread thread_;  // last: started when all else stands
};

}  // namespace lightckpt
