// A pool of plain std::thread workers. Work items are taken in order from a shared counter; what an item computes never
// depends on which thread takes it, so results do not depend on the number of threads.
#pragma once
#include <functional>

namespace kcp {

// KCP_NUM_THREADS, else OMP_NUM_THREADS, else the cores this process may use. At least 1.
int num_threads();

// In place of OMP_NUM_THREADS, which a framework may have overwritten in this process; 0: the user set none.
void set_default_threads(int n);

// work(0), ..., work(count - 1), by the calling thread and up to num_threads() - 1 workers. Returns when all are done.
// With one item or one thread, or while another call occupies the pool, the caller does all of it.
void parallel_for(long count, const std::function<void(long)>& work);

}  // namespace kcp
