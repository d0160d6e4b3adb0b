/* math.h: exp, tanh and the normal distribution on vectors, after a vec*.h.
 *
 * The polynomials are interpolations at Chebyshev nodes, made for this file; relative errors below
 * 2e-7 before rounding. All take NaN to NaN.
 */
#ifndef MR_KERNELS_SIMD_MATH_H
#define MR_KERNELS_SIMD_MATH_H

/* e^x: 2^n * e^r with |r| <= ln2/2; infinity above 88.8; 0 below -87.3, where a result that is not
 * a normal number would cost a microcode assist for every masked key. */
V_INLINE vf vexp(vf x) {
  const vf least = vset1(-87.3f);
  vf all = x;
  x = vmin(vset1(90.0f), vmax(least, x));
  vf n = vround(vmul(x, vset1(1.44269504f)));
  vf r = vfnma(n, vset1(0.693359375f), x); /* ln2 in two parts: the first has 10 bits */
  r = vfnma(n, vset1(-2.12194440e-4f), r);
  vf p = vfma(vset1(0.00139262508f), r, vset1(0.00836323288f));
  p = vfma(p, r, vset1(0.0416665542f));
  p = vfma(p, r, vset1(0.166665767f));
  p = vfma(p, r, vset1(0.5f));
  p = vfma(p, r, vset1(1.0f));
  p = vfma(p, r, vset1(1.0f));
  return vselect_lt(all, least, vzero(), vscale2(p, n));
}

/* 2^x for x < 128: 1 exactly at 0; 0 below -126, for the same reason. (2^f - 1) / f is
 * interpolated.
 */
V_INLINE vf vexp2(vf x) {
  vf f = vfraction(x);
  vf p = vfma(vset1(0.0017883688f), f, vset1(0.00919938739f));
  p = vfma(p, f, vset1(0.0556570552f));
  p = vfma(p, f, vset1(0.240207195f));
  p = vfma(p, f, vset1(0.69314754f));
  p = vfma(p, f, vset1(1.0f));
  return vscale2_floor(p, x, vset1(-126.0f));
}

/* 1 / (1 + e^-x), not below e^-87 */
V_INLINE vf vsigmoid(vf x) {
  vf e = vexp(vmin(vset1(87.0f), vsub(vzero(), x)));
  return vrecip(vadd(vset1(1.0f), e));
}

/* |x| < 0.63: x times a polynomial in x^2; else 1 - 2/(e^2|x| + 1) with the sign of x. */
V_INLINE vf vtanh(vf x) {
  vf a = vabs(x), z = vmul(x, x), one = vset1(1.0f);
  vf p = vfma(vset1(-0.00559978503f), z, vset1(0.020536972f));
  p = vfma(p, z, vset1(-0.0537042774f));
  p = vfma(p, z, vset1(0.133309172f));
  p = vfma(p, z, vset1(-0.333332514f));
  vf small = vfma(vmul(p, z), x, x);
  vf large = vsub(one, vdiv(vset1(2.0f), vadd(vexp(vadd(a, a)), one)));
  return vselect_lt(a, vset1(0.63f), small, vcopysign(large, x));
}

/* Phi(x), the normal distribution: erfc(a) = e^-a^2 * t * Q(t), a = |x|/sqrt 2, t = 2/(2 + a). */
V_INLINE vf vphi(vf x) {
  vf a = vmin(vset1(10.0f), vmul(vabs(x), vset1(0.707106781f))), half = vset1(0.5f);
  vf t = vdiv(vset1(2.0f), vadd(a, vset1(2.0f)));
  vf p = vfma(vset1(-0.059714919f), t, vset1(0.28776831f));
  p = vfma(p, t, vset1(-0.493863649f));
  p = vfma(p, t, vset1(0.285697711f));
  p = vfma(p, t, vset1(-0.0318417576f));
  p = vfma(p, t, vset1(0.204853655f));
  p = vfma(p, t, vset1(0.242572893f));
  p = vfma(p, t, vset1(0.282445042f));
  p = vfma(p, t, vset1(0.282082674f));
  vf tail = vmul(vmul(vmul(p, t), half), vexp(vsub(vzero(), vmul(a, a))));
  return vselect_lt(x, vzero(), tail, vsub(vset1(1.0f), tail));
}

#endif
