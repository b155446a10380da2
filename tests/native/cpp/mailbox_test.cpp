// A thread plays the GPU: it posts queries, waits for the answers, and checks that it sees what was written.
#include <cmath>
#include <thread>
#include <vector>

#include "check.h"
#include "errors.h"
#include "fault.h"
#include "mailbox.h"

using namespace coattn;

namespace {

constexpr int kLayers = 3, kSeqs = 2, kHeads = 2, kSize = 16, kBlock = 4, kBlocks = 5;

// One layer's letter and blocks. Values are all `value`, so the answer is known whatever the query.
struct Layer {
  alignas(64) uint32_t post = 0;
  alignas(64) uint32_t reply = 0;
  std::vector<float> q = std::vector<float>(kSeqs * kHeads * kSize);
  std::vector<float> out = std::vector<float>(kSeqs * kHeads * kSize);
  std::vector<float> lse = std::vector<float>(kSeqs * kHeads);
  std::vector<float> blocks = std::vector<float>(kBlocks * kHeads * 2 * kBlock * kSize);
};

struct World {
  std::vector<Layer> layers = std::vector<Layer>(kLayers);
  std::vector<int32_t> table{0, 1, 2, 3, 4, 0};
  std::vector<int32_t> tokens{11, 5};

  explicit World(Mailbox& mailbox) {
    for (int l = 0; l < kLayers; ++l) {
      Layer& layer = layers[l];
      for (float& x : layer.blocks) x = static_cast<float>(l + 1);
      AttendJob job{};
      job.seqs = kSeqs;
      job.q_tokens = 1;
      job.q_heads = job.kv_heads = kHeads;
      job.head_size = kSize;
      job.q = layer.q.data();
      job.q_elem = job.elem = Elem::f32;
      job.q_seq = job.q_token = kHeads * kSize;
      job.q_head = kSize;
      job.scale = 0.25f;
      job.table = table.data();
      job.tokens = tokens.data();
      job.table_heads = 1;
      job.max_blocks = 3;
      job.base = reinterpret_cast<const uint8_t*>(layer.blocks.data());
      job.block_stride = kHeads * 2 * kBlock * kSize * sizeof(float);
      job.head_stride = 2 * kBlock * kSize * sizeof(float);
      job.num_blocks = kBlocks;
      job.block = kBlock;
      job.out = layer.out.data();
      job.lse = layer.lse.data();
      mailbox.add(job, &layer.post, &layer.reply, 0);
    }
  }

  // What the GPU does in one step; false where an answer did not come.
  bool step(uint32_t number, float query, int64_t patience_ms = 5000) {
    for (int l = 0; l < kLayers; ++l) {
      Layer& layer = layers[l];
      for (float& x : layer.q) x = query;
      __atomic_store_n(&layer.post, number, __ATOMIC_RELEASE);
      const int64_t give_up = now_ns() + patience_ms * 1'000'000;
      while (__atomic_load_n(&layer.reply, __ATOMIC_ACQUIRE) != number) {
        if (now_ns() > give_up) return false;
        std::this_thread::yield();
      }
      for (float x : layer.out) CHECK(std::abs(x - static_cast<float>(l + 1)) < 1e-5f);
      // every score is 0.25 * 16 * query * (l + 1)
      const float score = 4 * query * static_cast<float>(l + 1);
      for (int h = 0; h < kHeads; ++h) CHECK(std::abs(layer.lse[h] - score - std::log(11.0f)) < 1e-4f);
    }
    return true;
  }
};

}  // namespace

TEST(mailbox_answers_every_step) {
  Mailbox mailbox(2'000'000);
  World world(mailbox);
  for (uint32_t s = 1; s <= 300; ++s) {
    mailbox.begin(s, kSeqs);
    bool ok = false;
    std::thread gpu([&] { ok = world.step(s, 0.01f * static_cast<float>(s)); });
    gpu.join();
    CHECK(ok);
    CHECK(mailbox.finish(1'000'000).empty());
    for (const JobTimes& t : mailbox.times()) CHECK(t.done_ns >= t.posted_ns && t.posted_ns > 0);
  }
  CHECK(mailbox.stop(1'000'000));
}

TEST(mailbox_answers_jobs_that_overtake_each_other) {
  Mailbox mailbox(2'000'000);
  World world(mailbox);
  for (uint32_t s = 1; s <= 50; ++s) {
    mailbox.begin(s, kSeqs);
    for (Layer& layer : world.layers) std::fill(layer.q.begin(), layer.q.end(), 0.5f);
    // the last first, and each only when the one before was answered
    for (int l = kLayers - 1; l >= 0; --l) {
      __atomic_store_n(&world.layers[l].post, s, __ATOMIC_RELEASE);
      const int64_t give_up = now_ns() + 5'000'000'000;
      while (__atomic_load_n(&world.layers[l].reply, __ATOMIC_ACQUIRE) != s && now_ns() < give_up) {
        std::this_thread::yield();
      }
      CHECK(world.layers[l].reply == s);
    }
    CHECK(mailbox.finish(1'000'000).empty());
  }
  CHECK(mailbox.stop(1'000'000));
}

TEST(mailbox_refuses_a_second_step_before_the_first_is_over) {
  Mailbox mailbox(2'000'000);
  World world(mailbox);
  mailbox.begin(1, kSeqs);
  CHECK_THROWS(mailbox.begin(2, kSeqs), Refusal);
  CHECK(world.step(1, 0.5f));
  CHECK(mailbox.finish(1'000'000).empty());
}

TEST(mailbox_gives_up_a_step_that_is_called_off) {
  Mailbox mailbox(60'000'000);
  World world(mailbox);
  mailbox.begin(1, kSeqs);
  mailbox.call_off();
  mailbox.finish(1'000'000);
  mailbox.begin(2, kSeqs);
  CHECK(world.step(2, 0.5f));
  CHECK(mailbox.finish(1'000'000).empty());
}

TEST(mailbox_says_why_a_step_failed) {
  Mailbox mailbox(50'000);
  World world(mailbox);
  mailbox.begin(1, kSeqs);  // never posted
  CHECK(mailbox.finish(2'000'000).find("deadline") != std::string::npos);
  inject_fault("throw", 0);
  mailbox.begin(2, kSeqs);
  CHECK(!world.step(2, 0.5f, 50));
  CHECK(mailbox.finish(2'000'000).find("injected") != std::string::npos);
  inject_fault("odd", 0);
  mailbox.begin(3, kSeqs);
  CHECK(!world.step(3, 0.5f, 50));
  CHECK(mailbox.finish(2'000'000).find("no std::exception") != std::string::npos);
  mailbox.begin(4, kSeqs);  // and goes on
  CHECK(world.step(4, 0.5f));
  CHECK(mailbox.finish(2'000'000).empty());
}

TEST(mailbox_notices_a_dead_server) {
  Mailbox mailbox(2'000'000);
  World world(mailbox);
  inject_fault("die", 0);
  mailbox.begin(1, kSeqs);
  CHECK(!world.step(1, 0.5f, 50));
  CHECK(mailbox.finish(2'000'000).find("died") != std::string::npos);
  CHECK(mailbox.stop(1'000'000));
}

TEST(mailbox_is_left_behind_when_its_server_is_stuck) {
  auto* mailbox = new Mailbox(2'000'000);
  auto* world = new World(*mailbox);  // both outlive the stuck thread
  inject_fault("stall", 0.4);
  mailbox->begin(1, kSeqs);
  CHECK(!world->step(1, 0.5f, 20));
  CHECK(!mailbox->finish(10'000).empty());
  CHECK(!mailbox->stop(10'000));
  abandon_pool();
  Mailbox next(2'000'000);
  World fresh(next);
  next.begin(1, kSeqs);
  CHECK(fresh.step(1, 0.5f));
  CHECK(next.finish(1'000'000).empty());
  std::this_thread::sleep_for(std::chrono::milliseconds(600));  // until the stuck thread has gone
  delete mailbox;
  delete world;
}
