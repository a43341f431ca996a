#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace kcp {
namespace {

cpu_set_t allowed_cores() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  // the main thread's mask: the calling thread may be one that a framework has pinned
  if (sched_getaffinity(getpid(), sizeof cores, &cores) != 0) CPU_SET(0, &cores);
  return cores;
}

struct Pool {
  std::mutex busy;  // held by the call that uses the pool
  std::mutex mutex;
  std::condition_variable wake, done;
  std::vector<std::thread> workers;
  const std::function<void(long)>* work = nullptr;
  std::atomic<long> next{0};
  long count = 0;
  int tickets = 0;           // workers that may still join the current call
  int running = 0;           // workers that have joined and not finished
  std::exception_ptr error;  // the first one thrown by an item

  void drain() {
    try {
      for (long i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) (*work)(i);
    } catch (...) {
      std::lock_guard<std::mutex> lock(mutex);
      if (!error) error = std::current_exception();
      next.store(count, std::memory_order_relaxed);
    }
  }
  void worker() {
    const cpu_set_t cores = allowed_cores();
    pthread_setaffinity_np(pthread_self(), sizeof cores, &cores);
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
      wake.wait(lock, [this] { return tickets > 0; });
      tickets--, running++;
      lock.unlock();
      drain();
      lock.lock();
      if (--running == 0) done.notify_one();
    }
  }
  void run(long n, int helpers, const std::function<void(long)>& f) {
    {
      std::lock_guard<std::mutex> lock(mutex);
      while ((int)workers.size() < helpers) workers.emplace_back([this] { worker(); });
      work = &f;
      count = n;
      error = nullptr;
      next.store(0, std::memory_order_relaxed);
      tickets = helpers;
    }
    wake.notify_all();
    drain();
    std::unique_lock<std::mutex> lock(mutex);
    tickets = 0;  // a worker that has not woken by now is not waited for
    done.wait(lock, [this] { return running == 0; });
    if (error) std::rethrow_exception(error);
  }
};

// Never freed: workers may outlive static destruction. A forked child has no workers and starts a pool of its own.
std::atomic<Pool*> pool{nullptr};
void forget_pool() { pool.store(nullptr); }
Pool& get_pool() {
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(nullptr, nullptr, forget_pool); });
  Pool* p = pool.load();
  if (p) return *p;
  Pool* fresh = new Pool;
  if (pool.compare_exchange_strong(p, fresh)) return *fresh;
  delete fresh;
  return *p;
}

// What set_default_threads was told; -1: nothing yet
std::atomic<int> told{-1};

int positive(const char* name) {
  const char* text = getenv(name);
  return text ? atoi(text) : 0;
}

}  // namespace

int num_threads() {
  int n = positive("KCP_NUM_THREADS");
  if (n <= 0) n = told.load() >= 0 ? told.load() : positive("OMP_NUM_THREADS");
  if (n <= 0) {
    const cpu_set_t cores = allowed_cores();
    n = CPU_COUNT(&cores);
  }
  return n < 1 ? 1 : n > 1024 ? 1024 : n;
}

void set_default_threads(int n) { told.store(n < 0 ? 0 : n); }

void parallel_for(long count, const std::function<void(long)>& work) {
  const int threads = num_threads();
  const long helpers = (threads < count ? threads : count) - 1;
  if (helpers > 0) {
    Pool& p = get_pool();
    std::unique_lock<std::mutex> mine(p.busy, std::try_to_lock);
    if (mine) return p.run(count, (int)helpers, work);
  }
  for (long i = 0; i < count; i++) work(i);
}

}  // namespace kcp
