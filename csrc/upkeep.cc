// Doing one job after the other, while nobody has to wait. See upkeep.h.
#include "upkeep.h"

#include <utility>

#include "signals.h"

namespace lightckpt {

Upkeep::Upkeep() : thread_([this] { work(); }) {}

Upkeep::~Upkeep() {
  {
    MutexLock lock(mutex_);
    ending_ = true;
    has_job_.notify_all();
  }
  thread_.join();
}

bool Upkeep::run(std::function<void()> job, const Deadline& deadline) {
  MutexLock lock(mutex_);
  jobs_.push_back(std::move(job));
  const uint64_t number = ++asked_;
  has_job_.notify_all();
  while (done_ < number && !deadline.passed()) has_done_.wait_for(lock, deadline.left());
  return done_ >= number;
}

bool Upkeep::take(std::function<void()>* job) {
  MutexLock lock(mutex_);
  while (!ending_ && jobs_.empty()) has_job_.wait(lock);
  if (ending_) return false;
  *job = std::move(jobs_.front());
  jobs_.pop_front();
  return true;
}

void Upkeep::work() {
  block_signals();
  std::function<void()> job;
  while (take(&job)) {
    job();
    MutexLock lock(mutex_);
    ++done_;
    has_done_.notify_all();
  }
}

}  // namespace lightckpt
