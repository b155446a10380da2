#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <numeric>
#include <stdexcept>
#include <thread>

#include "check.h"
#include "errors.h"
#include "machine_limits.h"
#include "runtime.h"
#include "topology.h"
#include "worker_pool.h"

using namespace coattn;

TEST(pool_every_worker_runs_each_job_once) {
  for (int threads : {1, 2, 3, 6}) {
    WorkerPool pool(threads);
    std::vector<int> count(threads, 0);  // plain ints: only the pool's own ordering makes this race-free
    for (int i = 0; i < 500; ++i) {
      pool.run(Join::all, [&](int worker, int workers) {
        CHECK(workers == threads);
        ++count[worker];
      });
      for (int c : count) CHECK(c == i + 1);
    }
  }
}

TEST(pool_willing_jobs_do_all_work_once) {
  WorkerPool pool(4, 50);
  for (int i = 0; i < 500; ++i) {
    std::vector<int> hit(1 + i % 97, 0);
    pool.parallel_for(static_cast<int64_t>(hit.size()), 1 + i % 5, [&](int, int64_t lo, int64_t hi) {
      for (int64_t j = lo; j < hi; ++j) ++hit[j];
    });
    for (int h : hit) CHECK(h == 1);
    if (i % 100 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));  // let workers fall asleep
  }
}

TEST(pool_mixes_both_kinds_of_jobs) {
  WorkerPool pool(3, 0);
  std::vector<int> count(3, 0);
  for (int i = 0; i < 300; ++i) {
    std::atomic<int64_t> sum{0};
    pool.parallel_for(64, 8, [&](int, int64_t lo, int64_t hi) {
      for (int64_t j = lo; j < hi; ++j) sum += j;
    });
    CHECK(sum == 64 * 63 / 2);
    pool.run(Join::all, [&](int worker, int) { ++count[worker]; });
  }
  for (int c : count) CHECK(c == 300);
}

TEST(pool_first_exception_reaches_the_caller) {
  WorkerPool pool(4);
  for (int i = 0; i < 100; ++i) {
    CHECK_THROWS(pool.run(Join::all,
                          [&](int worker, int) {
                            if (worker == i % 4) throw std::logic_error("x");
                          }),
                 std::logic_error);
    CHECK_THROWS(pool.parallel_for(100, 1,
                                   [&](int, int64_t lo, int64_t) {
                                     if (lo == i) throw std::logic_error("x");
                                   }),
                 std::logic_error);
  }
  int ran = 0;
  pool.run(Join::all, [&](int worker, int) {
    if (worker == 0) ++ran;
  });
  CHECK(ran == 1);
}

TEST(pool_nested_jobs_are_refused) {
  WorkerPool pool(2);
  CHECK_THROWS(pool.run(Join::all, [&](int, int) { pool.run(Join::all, [](int, int) {}); }), Refusal);
}

TEST(pool_callers_take_turns) {
  WorkerPool pool(3);
  int64_t total = 0;  // guarded by the pool's taking turns
  std::vector<std::thread> callers;
  for (int c = 0; c < 4; ++c) {
    callers.emplace_back([&] {
      for (int i = 0; i < 200; ++i)
        pool.run(Join::all, [&](int worker, int) {
          if (worker == 0) ++total;
        });
    });
  }
  for (auto& t : callers) t.join();
  CHECK(total == 800);
}

// The caller of a job may change where workers sit while another thread looks for its CPU.
TEST(pool_pins_callers_while_jobs_run) {
  WorkerPool pool(2, 50);
  std::atomic<bool> stop{false};
  std::thread runs([&] {
    while (!stop.load()) pool.run(Join::all, [](int, int) {});
  });
  for (int i = 0; i < 200; ++i) {
    std::thread([&] { const auto seat = pool.pin_caller(); }).join();
  }
  stop.store(true);
  runs.join();
}

TEST(pool_pins_one_caller_at_a_time) {
  WorkerPool pool(1);
  cpu_set_t all;
  CHECK(pthread_getaffinity_np(pthread_self(), sizeof(all), &all) == 0);
  const auto cpus = [] {
    cpu_set_t set;
    CHECK(pthread_getaffinity_np(pthread_self(), sizeof(set), &set) == 0);
    return CPU_COUNT(&set);
  };
  for (int i = 0; i < 2; ++i) {  // who ends gives the seat to the next
    std::thread([&] {
      const auto seat = pool.pin_caller();
      CHECK(seat.owns_lock());
      CHECK(cpus() == 1);
      int other = 0;
      bool second = true;
      std::thread([&] {
        // else it has what the thread that made it has
        CHECK(pthread_setaffinity_np(pthread_self(), sizeof(all), &all) == 0);
        second = pool.pin_caller().owns_lock();
        other = cpus();
      }).join();
      CHECK(!second);
      CHECK(other == CPU_COUNT(&all));
    }).join();
  }
}

TEST(pool_starts_and_stops) {
  for (int i = 0; i < 50; ++i) {
    WorkerPool pool(1 + i % 5, i % 2 ? 0 : 1000);
    if (i % 3) pool.run(Join::all, [](int, int) {});
  }
  CHECK_THROWS(WorkerPool(0), Refusal);
}

TEST(queue_runs_in_order_and_carries_errors) {
  Runtime runtime(3);
  std::vector<int> order;
  std::vector<uint64_t> tickets;
  for (int i = 0; i < 100; ++i) {
    tickets.push_back(runtime.queue.submit([&order, i](WorkerPool& pool) {
      pool.run(Join::all, [&](int worker, int) {
        if (worker == 0) order.push_back(i);
      });
      if (i == 50) throw std::logic_error("fifty");
    }));
  }
  for (int i = 0; i < 100; ++i) {
    if (i == 50) {
      CHECK_THROWS(runtime.queue.wait(tickets[i]), std::logic_error);
    } else {
      runtime.queue.wait(tickets[i]);
    }
  }
  for (int i = 0; i < 100; ++i) CHECK(order[i] == i);
  CHECK_THROWS(runtime.queue.wait(tickets[0]), Refusal);
  runtime.queue.submit([](WorkerPool&) {});  // left behind: the destructor finishes it
}

TEST(runtime_can_be_resized_while_used) {
  std::atomic<bool> stop{false};
  std::thread user([&] {
    while (!stop) {
      auto r = runtime();
      std::atomic<int> n{0};
      r->pool.run(Join::all, [&](int, int) { ++n; });
      CHECK(n == r->pool.size());
    }
  });
  for (int i = 0; i < 60; ++i) set_threads(1 + i % 4);
  stop = true;
  user.join();
  set_threads(2);
}

TEST(topology_reads_lists) {
  CHECK((parse_cpu_list("0-3,8,10-11") == std::vector<int>{0, 1, 2, 3, 8, 10, 11}));
  CHECK(parse_cpu_list("").empty());
  CHECK(default_threads() >= 1);
  CHECK(!usable_cpus().empty());
}

TEST(limits_measure) {
  CHECK(job_latency(2, 100, 0).size() == 100);
  CHECK(stream_read_gbps(2, 1 << 22, 1) > 0);
  CHECK(random_gather_gbps(2, 4096, 1 << 22, 1) > 0);
}
