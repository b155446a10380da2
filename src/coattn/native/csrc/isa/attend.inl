// attend: scores, online softmax and weighted values of one tile, for up to kQueryBatch queries at a time.
// The next batch of a large group finds the tile in the L1 cache, so each row comes from DRAM once.
namespace coattn::COATTN_ISA {
namespace {

// Scores in float32, whatever the keys are.
template <Elem E>
struct FloatDot {
  static void begin(AttendGroup& s) {
    for (int g = 0; g < s.group; ++g)
      to_pair_order<E>(s.q + g * s.stride, s.prep + g * s.stride, s.head_size);
  }

  static void run(const AttendGroup& s, int g0, int batch, const AttendTile& tile, Ahead& ahead,
                  float* scores) {
    const float* q = s.prep + g0 * s.stride;
    float bias[kQueryBatch] = {};
    if constexpr (is_quantised(E)) {
      fold(s, q, batch, tile, bias);
      q = s.fold;
    }
    dot_tile<E>(q, s.stride, batch, s.head_size, Strided{tile.k, tile.stride}, tile.n, ahead, scores);
    if constexpr (is_quantised(E)) {
      for (int g = 0; g < batch; ++g) {
        for (int t = 0; t < tile.n; t += W) {
          vstore(scores + g * kTile + t, vadd(vload(scores + g * kTile + t), vset(bias[g])));
        }
      }
    }
  }

 private:
  // q . (min + scale * code) = (q * scale) . code + q . min: one pass over q a block instead of one a key.
  static void fold(const AttendGroup& s, const float* q, int batch, const AttendTile& tile, float* bias) {
    float scale[2 * W], low[2 * W];
    vf sums[kQueryBatch];
    for (int g = 0; g < batch; ++g) sums[g] = vzero();
    for (int c = 0; c < pairs<E>(s.head_size); ++c) {
      for (int lane = 0; lane < 2 * W; ++lane) {
        const int ch = channel<E>(s.head_size, c, lane);
        scale[lane] = ch < 0 ? 0.0f : f16_to_f32(tile.k_scale[ch]);
        low[lane] = ch < 0 ? 0.0f : f16_to_f32(tile.k_min[ch]);
      }
      for (int g = 0; g < batch; ++g) {
        for (int h = 0; h < 2 * W; h += W) {
          const vf x = vload(q + g * s.stride + c * 2 * W + h);
          vstore(s.fold + g * s.stride + c * 2 * W + h, vmul(x, vload(scale + h)));
          sums[g] = vfma(x, vload(low + h), sums[g]);
        }
      }
    }
    for (int g = 0; g < batch; ++g) bias[g] = vhsum(sums[g]);
  }
};

// p -> p * scale[token], and the running sum of p * min[token], for one query.
inline void fold_values(const float* p, int n, const uint16_t* scale, const uint16_t* low, float* folded,
                        float factor, float& bias) {
  vf sum = vzero();
  for (int t = 0; t < n; t += W) {
    vf step, base;
    if (n - t >= W) {
      step = vload_f16(scale + t);
      base = vload_f16(low + t);
    } else {
      uint16_t buffer[2][W] = {};
      std::memcpy(buffer[0], scale + t, sizeof(uint16_t) * static_cast<size_t>(n - t));
      std::memcpy(buffer[1], low + t, sizeof(uint16_t) * static_cast<size_t>(n - t));
      step = vload_f16(buffer[0]);
      base = vload_f16(buffer[1]);
    }
    const vf x = vload(p + t);
    vstore(folded + t, vmul(x, step));
    sum = vfma(x, base, sum);
  }
  bias = bias * factor + vhsum(sum);
}

// Weighted values in float32, whatever they are, in pair order.
template <Elem E>
struct FloatSum {
  static int stride(const AttendGroup& s) { return s.stride; }

  static void add(AttendGroup& s, int g0, int batch, const float* alpha, const AttendTile& tile,
                  const float* weights, Ahead& ahead) {
    accumulate_tile<E>(s.acc + g0 * s.stride, s.stride, alpha, batch, s.head_size,
                       Strided{tile.v, tile.stride}, tile.n, {weights, weights}, ahead);
  }

  static void natural(const AttendGroup& s, const float* acc, float* row) {
    from_pair_order<E>(acc, row, s.head_size);
  }
};

template <class Dot, class Sum>
void attend_begin(AttendGroup& s) {
  Dot::begin(s);
  std::memset(s.acc, 0, sizeof(float) * static_cast<size_t>(s.group) * static_cast<size_t>(Sum::stride(s)));
  for (int g = 0; g < s.group; ++g) {
    s.max[g] = -__builtin_inff();
    s.sum[g] = s.v_bias[g] = 0;
  }
}

template <Elem E, class Dot, class Sum>
void attend_tile(AttendGroup& s, const AttendTile& tile, const AttendTile*) {
  Ahead ahead = ahead_of(s);
  alignas(64) float scores[kQueryBatch * kTile];
  alignas(64) float folded[is_quantised(E) ? kQueryBatch * kTile : 1];
  for (int g0 = 0; g0 < s.group; g0 += kQueryBatch) {
    const int batch = s.group - g0 < kQueryBatch ? s.group - g0 : kQueryBatch;
    Dot::run(s, g0, batch, tile, ahead, scores);
    float alpha[kQueryBatch];
    for (int g = 0; g < batch; ++g) {
      float* raw = s.weights ? s.weights[g0 + g] + tile.token0 : nullptr;
      alpha[g] =
          softmax_tile(scores + g * kTile, tile.n, s.scale, s.softcap, s.max[g0 + g], s.sum[g0 + g], raw);
      if constexpr (is_quantised(E)) {
        fold_values(scores + g * kTile, tile.n, tile.v_scale, tile.v_min, folded + g * kTile, alpha[g],
                    s.v_bias[g0 + g]);
      }
    }
    Sum::add(s, g0, batch, alpha, tile, is_quantised(E) ? folded : scores, ahead);
  }
  ahead.finish(s);
}

template <Elem E, class Sum>
void attend_end(AttendGroup& s, float* out) {
  for (int g = 0; g < s.group; ++g) {
    float* row = out + static_cast<int64_t>(g) * s.head_size;
    Sum::natural(s, s.acc + static_cast<int64_t>(g) * Sum::stride(s), row);
    if constexpr (is_quantised(E)) {
      for (int d = 0; d < s.head_size; ++d) row[d] += s.v_bias[g];
    }
  }
}

template <Elem E, class Dot, class Sum = FloatSum<E>>
constexpr AttendKernel attend_kernel(const char* name) {
  return {name, attend_begin<Dot, Sum>, attend_tile<E, Dot, Sum>, attend_end<E, Sum>};
}

}  // namespace
}  // namespace coattn::COATTN_ISA
