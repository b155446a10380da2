// exp and tanh for softmax, on any vector type of isa/vec_*.h.
namespace coattn::COATTN_ISA {
namespace {

// exp(x) for x <= 0 within about 1 ulp; -inf gives 0 and NaN stays NaN. Cephes' polynomial on [-ln2/2,
// ln2/2].
inline vf vexp(vf x) {
  const vf clamped = vmax(vset(kExpLowest), x);
  const vf n = vround(vmul(clamped, vset(1.44269504088896341f)));
  vf r = vfma(n, vset(-0.693359375f), clamped);
  r = vfma(n, vset(2.12194440e-4f), r);
  vf p = vset(1.9875691500e-4f);
  p = vfma(p, r, vset(1.3981999507e-3f));
  p = vfma(p, r, vset(8.3334519073e-3f));
  p = vfma(p, r, vset(4.1665795894e-2f));
  p = vfma(p, r, vset(1.6666665459e-1f));
  p = vfma(p, r, vset(5.0000001201e-1f));
  p = vadd(vfma(vmul(r, r), p, r), vset(1.0f));
  return vless_pick(x, vset(kExpLowest), vzero(), vscale2(p, n));
}

// tanh for soft-capping: a polynomial near zero, where 1 - 2 / (e^2x + 1) would cancel.
inline vf vtanh(vf x) {
  const vf a = vabs(x), z = vmul(x, x);
  vf p = vset(-5.70498872745e-3f);
  p = vfma(p, z, vset(2.06390887954e-2f));
  p = vfma(p, z, vset(-5.37397155531e-2f));
  p = vfma(p, z, vset(1.33314422036e-1f));
  p = vfma(p, z, vset(-3.33332819422e-1f));
  const vf small = vfma(vmul(p, z), x, x);
  const vf e = vexp(vmul(a, vset(-2.0f)));
  const vf large = vcopysign(vdiv(vsub(vset(1.0f), e), vadd(vset(1.0f), e)), x);
  return vless_pick(a, vset(0.625f), small, large);
}

}  // namespace
}  // namespace coattn::COATTN_ISA
