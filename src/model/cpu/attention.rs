//! Causal attention over blocks of keys and values: each KV head is read once for all query heads that share it.
//!
//! The softmax is the running one of FlashAttention (arXiv 2205.14135) with blocks at fixed positions, so a row's
//! result does not depend on which rows are computed with it.

use super::super::kv::{BLOCK, KvShape, KvType, SCALED};
use super::ops::{exp, sum};
use super::simd::{Lanes, Simd};

/// Elements of a head.
pub(crate) const HEAD_DIM_MAX: usize = 256;

/// What one attention job needs to know.
#[derive(Clone, Copy)]
pub(crate) struct Attention<'a> {
    pub shape: KvShape,
    pub layer: usize,
    /// Query heads a KV head.
    pub group: usize,
    /// Addresses of the blocks from position 0 on.
    pub blocks: &'a [*mut u8],
    /// Position of row 0.
    pub start: usize,
    /// [rows, q_stride]: query heads first, rotated.
    pub q: *const f32,
    pub q_stride: usize,
    /// [rows, heads · head_dim]
    pub out: *mut f32,
    pub out_stride: usize,
}

unsafe impl Send for Attention<'_> {}
unsafe impl Sync for Attention<'_> {}

const F16: u8 = 0;
const F32: u8 = 1;
const Q8_0: u8 = 2;

/// Elements `i..i + 8`, and of long vectors those that are `apart` elements further; of [`Q8_0`] the codes.
#[inline(always)]
unsafe fn load_kv<L: Lanes, const KIND: u8>(p: *const u8, i: usize, apart: usize) -> L::F {
    unsafe {
        match KIND {
            F16 => L::load_f16_apart(p.cast::<u16>().add(i), apart),
            F32 => L::load_apart(p.cast::<f32>().add(i), apart),
            _ => L::load_i8_apart(p.cast::<i8>().add(i), apart),
        }
    }
}

/// The scale of some elements and their codes.
fn quantized(x: &[f32]) -> (u16, [i8; SCALED]) {
    let largest = x.iter().fold(0f32, |a, &b| if b.abs() > a { b.abs() } else { a });
    let scale = half::f16::from_f32(largest / 127.0);
    let inverse = if scale.to_f32() > 0.0 { 1.0 / scale.to_f32() } else { 0.0 };
    (scale.to_bits(), std::array::from_fn(|i| (x[i] * inverse).round_ties_even().clamp(-127.0, 127.0) as i8))
}

/// Writes K and V (`[head_dim]` each) of one position and head.
///
/// # Safety
/// The tier's CPU features; `block` is writable and no one else touches this position.
#[inline(always)]
pub(crate) unsafe fn store_position<S: Simd>(
    shape: &KvShape,
    layer: usize,
    head: usize,
    block: *mut u8,
    position: usize,
    k: &[f32],
    v: &[f32],
) {
    unsafe {
        let dim = shape.head_dim;
        let base = block.add(shape.offset(layer, head));
        let p = position % BLOCK;
        match shape.kind {
            KvType::F16 => {
                let (keys, values) = (base.cast::<u16>(), base.add(shape.head_bytes()).cast::<u16>());
                for i in (0..dim).step_by(8) {
                    let mut halves = [0u16; 8];
                    S::store_f16(halves.as_mut_ptr(), S::load(k.as_ptr().add(i)));
                    for (j, half) in halves.into_iter().enumerate() {
                        *keys.add((p / 8 * dim + i + j) * 8 + p % 8) = half;
                    }
                    S::store_f16(values.add((i / 8 * BLOCK + p) * 8), S::load(v.as_ptr().add(i)));
                }
            }
            KvType::F32 => {
                let (keys, values) = (base.cast::<f32>(), base.add(shape.head_bytes()).cast::<f32>());
                for i in 0..dim {
                    *keys.add((p / 8 * dim + i) * 8 + p % 8) = k[i];
                    *values.add((i / 8 * BLOCK + p) * 8 + i % 8) = v[i];
                }
            }
            KvType::Q8_0 => {
                let (keys, values) = (base.cast::<i8>(), base.add(shape.head_bytes()).cast::<i8>());
                let (key_scales, value_scales) =
                    (keys.add(BLOCK * dim).cast::<u16>(), values.add(BLOCK * dim).cast::<u16>());
                let groups = dim / SCALED;
                for g in 0..groups {
                    let (scale, codes) = quantized(&k[g * SCALED..(g + 1) * SCALED]);
                    *key_scales.add((p / 8 * groups + g) * 8 + p % 8) = scale;
                    for (i, code) in (g * SCALED..).zip(codes) {
                        *keys.add((p / 8 * dim + i) * 8 + p % 8) = code;
                    }
                    let (scale, codes) = quantized(&v[g * SCALED..(g + 1) * SCALED]);
                    *value_scales.add(g * BLOCK + p) = scale;
                    for (i, code) in (g * SCALED..).zip(codes) {
                        *values.add((i / 8 * BLOCK + p) * 8 + i % 8) = code;
                    }
                }
            }
        }
    }
}

/// Rows `first..last` for one KV head.
///
/// # Safety
/// The tier's CPU features; the addresses in `a` cover the rows; positions up to `start + last - 1` are written.
#[inline(always)]
pub(crate) unsafe fn attend<S: Simd>(a: &Attention, kv_head: usize, first: usize, last: usize) {
    unsafe {
        match a.shape.kind {
            KvType::F16 => attend_in::<S, F16>(a, kv_head, first, last),
            KvType::F32 => attend_in::<S, F32>(a, kv_head, first, last),
            KvType::Q8_0 => attend_in::<S, Q8_0>(a, kv_head, first, last),
        }
    }
}

#[inline(always)]
unsafe fn attend_in<S: Simd, const KIND: u8>(a: &Attention, kv_head: usize, first: usize, last: usize) {
    unsafe {
        match a.group {
            1 => rows::<S, 1, KIND>(a, kv_head, first, last),
            2 => rows::<S, 2, KIND>(a, kv_head, first, last),
            3 => rows::<S, 3, KIND>(a, kv_head, first, last),
            4 => rows::<S, 4, KIND>(a, kv_head, first, last),
            5 => rows::<S, 5, KIND>(a, kv_head, first, last),
            6 => rows::<S, 6, KIND>(a, kv_head, first, last),
            7 => rows::<S, 7, KIND>(a, kv_head, first, last),
            8 => rows::<S, 8, KIND>(a, kv_head, first, last),
            _ => unreachable!("the configuration was checked"),
        }
    }
}

/// The running softmax of one row: for each of G heads its largest score, its sum, and the weighted values.
struct Running<const G: usize> {
    max: [f32; G],
    sum: [f32; G],
    /// [G, head_dim]
    out: [[f32; HEAD_DIM_MAX]; G],
}

#[inline(always)]
unsafe fn rows<S: Simd, const G: usize, const KIND: u8>(a: &Attention, kv_head: usize, first: usize, last: usize) {
    unsafe {
        let dim = a.shape.head_dim;
        let scale = 1.0 / (dim as f32).sqrt();
        for r in first..last {
            let position = a.start + r;
            let q: [*const f32; G] = std::array::from_fn(|h| a.q.add(r * a.q_stride + (kv_head * G + h) * dim));
            let mut run: Running<G> =
                Running { max: [f32::NEG_INFINITY; G], sum: [0.0; G], out: [[0.0; HEAD_DIM_MAX]; G] };
            for (b, block) in a.blocks.iter().enumerate().take(position / BLOCK + 1) {
                let keys = block.add(a.shape.offset(a.layer, kv_head));
                let values = keys.add(a.shape.head_bytes());
                let valid = (position + 1 - b * BLOCK).min(BLOCK);
                one_block::<S, G, KIND>(dim, scale, &q, keys, values, valid, &mut run);
            }
            for h in 0..G {
                let out = a.out.add(r * a.out_stride + (kv_head * G + h) * dim);
                let inverse = S::splat(1.0 / run.sum[h]);
                for i in (0..dim).step_by(8) {
                    S::store(out.add(i), S::mul(S::load(run.out[h].as_ptr().add(i)), inverse));
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn one_block<S: Simd, const G: usize, const KIND: u8>(
    dim: usize,
    scale: f32,
    q: &[*const f32; G],
    keys: *const u8,
    values: *const u8,
    valid: usize,
    run: &mut Running<G>,
) {
    unsafe {
        let tiles = valid.div_ceil(8);
        let mut scores = [[0f32; BLOCK]; G];
        if S::Long::COUNT > S::COUNT {
            scores_of::<S::Long, G, 2, KIND>(dim, scale, q, keys, tiles, &mut scores);
        } else {
            scores_of::<S, G, 1, KIND>(dim, scale, q, keys, tiles, &mut scores);
        }
        for h in 0..G {
            let scores = &mut scores[h];
            scores[valid..8 * tiles].fill(f32::NEG_INFINITY);
            let mut largest = S::splat(f32::NEG_INFINITY);
            for t in 0..tiles {
                largest = S::max(S::load(scores.as_ptr().add(8 * t)), largest);
            }
            let mut lanes = [0f32; 8];
            S::store(lanes.as_mut_ptr(), largest);
            let largest = lanes.iter().fold(run.max[h], |a, &b| if b > a { b } else { a });
            let mut correction = [0f32; 8];
            S::store(correction.as_mut_ptr(), exp::<S>(S::splat(run.max[h] - largest)));
            for t in 0..tiles {
                let p = scores.as_mut_ptr().add(8 * t);
                S::store(p, exp::<S>(S::sub(S::load(p), S::splat(largest))));
            }
            scores[valid..8 * tiles].fill(0.0);
            let mut total = S::splat(0.0);
            for t in 0..tiles {
                total = S::add(total, S::load(scores.as_ptr().add(8 * t)));
            }
            run.sum[h] = run.sum[h] * correction[0] + sum::<S>(total);
            run.max[h] = largest;
            let c = S::splat(correction[0]);
            for i in (0..dim).step_by(8) {
                let out = run.out[h].as_mut_ptr().add(i);
                S::store(out, S::mul(S::load(out), c));
            }
        }
        // Of Q8_0: the weights with the values' scales.
        let mut scaled = [[0f32; BLOCK]; G];
        for i in (0..dim).step_by(SCALED) {
            let end = (i + SCALED).min(dim);
            if KIND == Q8_0 {
                let scales = values.add(BLOCK * dim).cast::<u16>().add(i / SCALED * BLOCK);
                for t in 0..tiles {
                    let scale = S::load_f16(scales.add(8 * t));
                    for h in 0..G {
                        let weight = S::mul(S::load(scores[h].as_ptr().add(8 * t)), scale);
                        S::store(scaled[h].as_mut_ptr().add(8 * t), weight);
                    }
                }
            }
            let weights = if KIND == Q8_0 { &scaled } else { &scores };
            let count = S::Long::COUNT;
            let mut i = i;
            while count > S::COUNT && i + 2 * count <= end {
                weigh::<S::Long, G, 2, KIND>(i, values, valid, weights, run);
                i += 2 * count;
            }
            while i < end {
                weigh::<S::Long, G, 1, KIND>(i, values, valid, weights, run);
                i += count;
            }
        }
    }
}

/// The scores of the first `8 · tiles` positions of a block, U vectors at a time and so of a few more. What stands behind the last valid
/// position is masked by the caller.
#[inline(always)]
unsafe fn scores_of<L: Lanes, const G: usize, const U: usize, const KIND: u8>(
    dim: usize,
    scale: f32,
    q: &[*const f32; G],
    keys: *const u8,
    tiles: usize,
    scores: &mut [[f32; BLOCK]; G],
) {
    unsafe {
        // Tiles of 8 positions in a vector.
        let wide = L::COUNT / 8;
        for t in (0..tiles).step_by(U * wide) {
            let mut acc = [[L::splat(0.0); G]; U];
            let add = |sums: &mut [[L::F; G]; U], i: usize| {
                let k: [L::F; U] =
                    std::array::from_fn(|u| load_kv::<L, KIND>(keys, ((t + u * wide) * dim + i) * 8, dim * 8));
                for h in 0..G {
                    let q = L::splat(*q[h].add(i));
                    for u in 0..U {
                        sums[u][h] = L::fma(k[u], q, sums[u][h]);
                    }
                }
            };
            if KIND == Q8_0 {
                // The scales of 8 positions are a vector: each group is summed up and then scaled.
                let scales = keys.add(BLOCK * dim).cast::<u16>();
                let groups = dim / SCALED;
                for g in 0..groups {
                    let mut part = [[L::splat(0.0); G]; U];
                    for i in g * SCALED..(g + 1) * SCALED {
                        add(&mut part, i);
                    }
                    for u in 0..U {
                        let scale = L::load_f16_apart(scales.add(((t + u * wide) * groups + g) * 8), groups * 8);
                        for h in 0..G {
                            acc[u][h] = L::fma(part[u][h], scale, acc[u][h]);
                        }
                    }
                }
            } else {
                for i in 0..dim {
                    add(&mut acc, i);
                }
            }
            for u in 0..U {
                for h in 0..G {
                    let to = scores[h].as_mut_ptr().add(8 * (t + u * wide));
                    L::store(to, L::mul(acc[u][h], L::splat(scale)));
                }
            }
        }
    }
}

/// Adds U vectors of values from element `i` on, of the first `valid` positions of a block, each times its weight.
#[inline(always)]
unsafe fn weigh<L: Lanes, const G: usize, const U: usize, const KIND: u8>(
    i: usize,
    values: *const u8,
    valid: usize,
    weights: &[[f32; BLOCK]; G],
    run: &mut Running<G>,
) {
    unsafe {
        let at = |u: usize| i + u * L::COUNT;
        let mut acc: [[L::F; G]; U] =
            std::array::from_fn(|u| std::array::from_fn(|h| L::load(run.out[h].as_ptr().add(at(u)))));
        for p in 0..valid {
            let v: [L::F; U] = std::array::from_fn(|u| load_kv::<L, KIND>(values, at(u) * BLOCK + p * 8, BLOCK * 8));
            for h in 0..G {
                let weight = L::splat(weights[h][p]);
                for u in 0..U {
                    acc[u][h] = L::fma(v[u], weight, acc[u][h]);
                }
            }
        }
        for u in 0..U {
            for h in 0..G {
                L::store(run.out[h].as_mut_ptr().add(at(u)), acc[u][h]);
            }
        }
    }
}
