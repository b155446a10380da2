// Weighted sums of rows anywhere in memory, on the same inner loops as attend.
namespace coattn::COATTN_ISA {
namespace {

template <Elem E>
void sum_tile(float* acc, int stride, int group, int head_size, const uint8_t* const* rows, int n,
              const float* w0, const float* w1) {
  // the caller has asked for the rows while the tile before was added up
  float one[kQueryBatch];
  for (int g = 0; g < kQueryBatch; ++g) one[g] = 1.0f;
  Ahead none;
  for (int g0 = 0; g0 < group; g0 += kQueryBatch) {
    const int batch = group - g0 < kQueryBatch ? group - g0 : kQueryBatch;
    const int64_t at = static_cast<int64_t>(g0) * kTile;
    accumulate_tile<E>(acc + static_cast<int64_t>(g0) * stride, stride, one, batch, head_size, Gathered{rows},
                       n, {w0 + at, w1 + at}, none);
  }
}

void read(const uint8_t* p, int64_t bytes, const uint8_t* next) {
  vf top[4] = {vzero(), vzero(), vzero(), vzero()};
  for (int64_t i = 0; i < bytes; i += 64) {
    if (next) __builtin_prefetch(next + i, 0, kAheadHint);
    for (int j = 0; j < 16 / W; ++j)
      top[j % 4] = vmax(vload(reinterpret_cast<const float*>(p + i) + j * W), top[j % 4]);
  }
  // Keeps the loads alive.
  volatile float sink = vhmax(vmax(vmax(top[0], top[1]), vmax(top[2], top[3])));
  (void)sink;
}

}  // namespace
}  // namespace coattn::COATTN_ISA
