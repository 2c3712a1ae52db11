//! Causal attention over blocks of keys and values: each KV head is read once for all query heads that share it.
//!
//! The softmax is the running one of FlashAttention (arXiv 2205.14135) with blocks at fixed positions, so a row's
//! result does not depend on which rows are computed with it.

use super::super::kv::{BLOCK, KvShape, KvType};
use super::ops::{exp, sum};
use super::simd::Simd;

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

#[inline(always)]
unsafe fn load_kv<S: Simd>(kind: KvType, p: *const u8, i: usize) -> S::F {
    unsafe {
        match kind {
            KvType::F16 => S::load_f16(p.cast::<u16>().add(i)),
            KvType::F32 => S::load(p.cast::<f32>().add(i)),
        }
    }
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
                let (keys, values) = (base.cast::<u16>(), base.cast::<u16>().add(shape.head_len()));
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
                let (keys, values) = (base.cast::<f32>(), base.cast::<f32>().add(shape.head_len()));
                for i in 0..dim {
                    *keys.add((p / 8 * dim + i) * 8 + p % 8) = k[i];
                    *values.add((i / 8 * BLOCK + p) * 8 + i % 8) = v[i];
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
        match (a.group, a.shape.kind) {
            (1, KvType::F16) => rows::<S, 1, true>(a, kv_head, first, last),
            (2, KvType::F16) => rows::<S, 2, true>(a, kv_head, first, last),
            (3, KvType::F16) => rows::<S, 3, true>(a, kv_head, first, last),
            (4, KvType::F16) => rows::<S, 4, true>(a, kv_head, first, last),
            (5, KvType::F16) => rows::<S, 5, true>(a, kv_head, first, last),
            (6, KvType::F16) => rows::<S, 6, true>(a, kv_head, first, last),
            (7, KvType::F16) => rows::<S, 7, true>(a, kv_head, first, last),
            (8, KvType::F16) => rows::<S, 8, true>(a, kv_head, first, last),
            (1, KvType::F32) => rows::<S, 1, false>(a, kv_head, first, last),
            (2, KvType::F32) => rows::<S, 2, false>(a, kv_head, first, last),
            (3, KvType::F32) => rows::<S, 3, false>(a, kv_head, first, last),
            (4, KvType::F32) => rows::<S, 4, false>(a, kv_head, first, last),
            (5, KvType::F32) => rows::<S, 5, false>(a, kv_head, first, last),
            (6, KvType::F32) => rows::<S, 6, false>(a, kv_head, first, last),
            (7, KvType::F32) => rows::<S, 7, false>(a, kv_head, first, last),
            (8, KvType::F32) => rows::<S, 8, false>(a, kv_head, first, last),
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
unsafe fn rows<S: Simd, const G: usize, const HALF: bool>(a: &Attention, kv_head: usize, first: usize, last: usize) {
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
                let values = keys.add(a.shape.head_len() * a.shape.kind.bytes());
                let valid = (position + 1 - b * BLOCK).min(BLOCK);
                one_block::<S, G, HALF>(dim, scale, &q, keys, values, valid, &mut run);
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
unsafe fn one_block<S: Simd, const G: usize, const HALF: bool>(
    dim: usize,
    scale: f32,
    q: &[*const f32; G],
    keys: *const u8,
    values: *const u8,
    valid: usize,
    run: &mut Running<G>,
) {
    unsafe {
        let kind = if HALF { KvType::F16 } else { KvType::F32 };
        let tiles = valid.div_ceil(8);
        let mut scores = [[0f32; BLOCK]; G];
        for t in 0..tiles {
            let mut acc = [S::splat(0.0); G];
            for i in 0..dim {
                let k = load_kv::<S>(kind, keys, (t * dim + i) * 8);
                for h in 0..G {
                    acc[h] = S::fma(k, S::splat(*q[h].add(i)), acc[h]);
                }
            }
            for h in 0..G {
                S::store(scores[h].as_mut_ptr().add(8 * t), S::mul(acc[h], S::splat(scale)));
            }
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
        for i in (0..dim).step_by(8) {
            let mut acc: [S::F; G] = std::array::from_fn(|h| S::load(run.out[h].as_ptr().add(i)));
            for p in 0..valid {
                let v = load_kv::<S>(kind, values, i * BLOCK + p * 8);
                for h in 0..G {
                    acc[h] = S::fma(v, S::splat(scores[h][p]), acc[h]);
                }
            }
            for h in 0..G {
                S::store(run.out[h].as_mut_ptr().add(i), acc[h]);
            }
        }
    }
}
