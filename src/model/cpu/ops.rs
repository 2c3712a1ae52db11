//! The small steps between matrix products. Each works on whole vectors of 8; lengths are multiples of 8.

use super::simd::Simd;

/// eˣ for x ≤ 88; below −87 it is as good as 0. Polynomial of Cephes' `expf`, relative error under 2⁻²².
#[inline(always)]
pub(crate) unsafe fn exp<S: Simd>(x: S::F) -> S::F {
    unsafe {
        let x = S::min(S::max(x, S::splat(-87.0)), S::splat(88.0));
        let n = S::round(S::mul(x, S::splat(std::f32::consts::LOG2_E)));
        let nf = S::to_f(n);
        let r = S::fma(nf, S::splat(-0.693_359_4), x);
        let r = S::fma(nf, S::splat(2.121_944_4e-4), r);
        let mut p = S::splat(1.987_569_1e-4);
        for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
            p = S::fma(p, r, S::splat(c));
        }
        let y = S::add(S::fma(p, S::mul(r, r), r), S::splat(1.0));
        S::mul(y, S::exp2i(n))
    }
}

/// The sum of the lanes, in a fixed order.
#[inline(always)]
pub(crate) unsafe fn sum<S: Simd>(x: S::F) -> f32 {
    let mut l = [0f32; 8];
    unsafe { S::store(l.as_mut_ptr(), x) };
    ((l[0] + l[4]) + (l[1] + l[5])) + ((l[2] + l[6]) + (l[3] + l[7]))
}

/// `x += delta` (if `add`), then `delta = x / rms(x) · weight`: the sum's place is free for the result.
#[inline(always)]
pub(crate) unsafe fn rms_norm<S: Simd>(x: &mut [f32], delta: &mut [f32], add: bool, weight: &[f32], eps: f32) {
    let n = x.len();
    assert!(n.is_multiple_of(8) && weight.len() == n && delta.len() == n);
    unsafe {
        let mut squares = S::splat(0.0);
        let (p, out) = (x.as_mut_ptr(), delta.as_mut_ptr());
        for i in (0..n).step_by(8) {
            let mut v = S::load(p.add(i));
            if add {
                v = S::add(v, S::load(out.add(i)));
                S::store(p.add(i), v);
            }
            squares = S::fma(v, v, squares);
        }
        let scale = S::splat(1.0 / (sum::<S>(squares) / n as f32 + eps).sqrt());
        for i in (0..n).step_by(8) {
            let v = S::mul(S::mul(S::load(p.add(i)), scale), S::load(weight.as_ptr().add(i)));
            S::store(out.add(i), v);
        }
    }
}

/// `gate = gate · sigmoid(gate) · up`.
#[inline(always)]
pub(crate) unsafe fn swiglu<S: Simd>(gate: &mut [f32], up: &[f32]) {
    assert!(gate.len() == up.len() && gate.len().is_multiple_of(8));
    unsafe {
        for i in (0..gate.len()).step_by(8) {
            let g = S::load(gate.as_ptr().add(i));
            let e = exp::<S>(S::sub(S::splat(0.0), g));
            let y = S::mul(S::div(g, S::add(S::splat(1.0), e)), S::load(up.as_ptr().add(i)));
            S::store(gate.as_mut_ptr().add(i), y);
        }
    }
}

/// Rotates one head `x[dim]` in place; the pairs are `(i, i + dim / 2)`. `cos`, `sin`: `[dim / 2]` of this position.
#[inline(always)]
pub(crate) unsafe fn rope<S: Simd>(x: &mut [f32], cos: &[f32], sin: &[f32]) {
    let half = x.len() / 2;
    assert!(half.is_multiple_of(8) && cos.len() == half && sin.len() == half);
    unsafe {
        let p = x.as_mut_ptr();
        for i in (0..half).step_by(8) {
            let (a, b) = (S::load(p.add(i)), S::load(p.add(i + half)));
            let (c, s) = (S::load(cos.as_ptr().add(i)), S::load(sin.as_ptr().add(i)));
            S::store(p.add(i), S::sub(S::mul(a, c), S::mul(b, s)));
            S::store(p.add(i + half), S::fma(b, c, S::mul(a, s)));
        }
    }
}
