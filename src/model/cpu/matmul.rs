//! Matrix products on packed weights: `out[r, n] = x[r, k] · wᵀ`, rows of activations quantised to 8 bits in groups of 32.
//!
//! Every output is computed by one fixed sequence of operations over the groups of its row, so it does not depend on
//! how many rows or threads take part: a row's result is the same bits in prefill and in decode.

use super::super::weight::WeightType;
use super::packed::{GROUP, PANEL, Packed, group_bytes, header_bytes};
use super::simd::{Lanes, Simd};

/// Rows of activations as a matrix product wants them.
#[derive(Default)]
pub(crate) struct Rows {
    pub rows: usize,
    pub k: usize,
    /// [rows, k]
    codes: Vec<i8>,
    /// [rows, k / 32]
    scales: Vec<f32>,
    /// [rows, k / 32]: minus the sum of a group's values, as quantised.
    neg_sums: Vec<f32>,
    /// [rows, k / 16]: sums of the codes.
    sums: Vec<i16>,
    /// [rows, k], kept when some weights are floats.
    floats: Vec<f32>,
}

impl Rows {
    /// Room for `rows` of `k` inputs; contents are what was there. `k` is a multiple of 32 unless only floats are used.
    pub fn resize(&mut self, rows: usize, k: usize, floats: bool) {
        (self.rows, self.k) = (rows, k);
        let groups = k / GROUP;
        self.codes.resize(rows * k, 0);
        self.scales.resize(rows * groups, 0.0);
        self.neg_sums.resize(rows * groups, 0.0);
        self.sums.resize(rows * groups * 2, 0);
        self.floats.resize(if floats { rows * k } else { 0 }, 0.0);
    }

    pub fn view(&mut self) -> RowsMut {
        RowsMut {
            k: self.k,
            codes: self.codes.as_mut_ptr(),
            scales: self.scales.as_mut_ptr(),
            neg_sums: self.neg_sums.as_mut_ptr(),
            sums: self.sums.as_mut_ptr(),
            floats: if self.floats.is_empty() { std::ptr::null_mut() } else { self.floats.as_mut_ptr() },
        }
    }
}

/// For threads that fill different rows of one [`Rows`].
#[derive(Clone, Copy)]
pub(crate) struct RowsMut {
    k: usize,
    codes: *mut i8,
    scales: *mut f32,
    neg_sums: *mut f32,
    sums: *mut i16,
    floats: *mut f32,
}

unsafe impl Send for RowsMut {}
unsafe impl Sync for RowsMut {}

/// Quantises one row `x[k]` into row `r`.
///
/// # Safety
/// The tier's CPU features; `r` is a row of the `Rows` behind `to`, and no one else uses that row now.
#[inline(always)]
pub(crate) unsafe fn quantize_row<S: Simd>(x: &[f32], to: RowsMut, r: usize) {
    let k = to.k;
    debug_assert_eq!(x.len(), k);
    unsafe {
        if !to.floats.is_null() {
            std::ptr::copy_nonoverlapping(x.as_ptr(), to.floats.add(r * k), k);
        }
        let groups = k / GROUP;
        for g in 0..groups {
            let p = x.as_ptr().add(g * GROUP);
            let v = [S::load(p), S::load(p.add(8)), S::load(p.add(16)), S::load(p.add(24))];
            let largest = S::max(S::max(S::abs(v[0]), S::abs(v[1])), S::max(S::abs(v[2]), S::abs(v[3])));
            let mut lanes = [0f32; 8];
            S::store(lanes.as_mut_ptr(), largest);
            let largest = lanes.iter().fold(0f32, |a, &b| if b > a { b } else { a });
            let scale = largest / 127.0;
            // A group of zeros, or one too small to divide by, is all zero codes.
            let inverse = if largest > 1e-30 { 127.0 / largest } else { 0.0 };
            let inverse = S::splat(inverse);
            let (low, high) = (S::splat(-127.0), S::splat(127.0));
            let mut codes = [0i32; GROUP];
            for i in 0..4 {
                let q = S::round(S::max(S::min(S::mul(v[i], inverse), high), low));
                codes.as_mut_ptr().add(8 * i).cast::<S::I>().write_unaligned(q);
            }
            let out = to.codes.add(r * k + g * GROUP);
            let mut sums = [0i32; 2];
            for i in 0..GROUP {
                *out.add(i) = codes[i] as i8;
                sums[i / 16] += codes[i];
            }
            let at = r * groups + g;
            *to.scales.add(at) = scale;
            *to.neg_sums.add(at) = -((sums[0] + sums[1]) as f32 * scale);
            *to.sums.add(2 * at) = sums[0] as i16;
            *to.sums.add(2 * at + 1) = sums[1] as i16;
        }
    }
}

/// The codes of one group of a panel, unpacked: 8 vectors of 4 inputs × 8 outputs.
type Codes<S> = [<S as Lanes>::B; 8];

/// The scales of one group of a panel; what a kind does not use is left out by the compiler.
#[derive(Clone, Copy)]
struct Scales<S: Lanes> {
    d: S::F,
    min: S::F,
    /// Q6_K: the scales of inputs 0..16 and 16..32, and both.
    pairs: (S::W, S::W, S::W),
}

const Q4_0: u8 = 0;
const Q5_0: u8 = 1;
const Q8_0: u8 = 2;
const Q4K: u8 = 3;
const Q5K: u8 = 4;
const Q6K: u8 = 5;

const fn kind_of<const K: u8>() -> WeightType {
    match K {
        Q4_0 => WeightType::Q4_0,
        Q5_0 => WeightType::Q5_0,
        Q8_0 => WeightType::Q8_0,
        Q4K => WeightType::Q4K,
        Q5K => WeightType::Q5K,
        _ => WeightType::Q6K,
    }
}

/// Unpacks the codes of the group at `p`.
#[inline(always)]
unsafe fn unpack<S: Simd, const K: u8>(p: *const u8) -> Codes<S> {
    unsafe {
        if K == Q8_0 {
            let code = |j: usize| S::load_b(p.add(32 * j));
            return std::array::from_fn(|j| if S::DOT { S::lift(code(j)) } else { code(j) });
        }
        let [a, b, c, d] = [S::load_b(p), S::load_b(p.add(32)), S::load_b(p.add(64)), S::load_b(p.add(96))];
        let v = [
            S::nibble_low(a),
            S::nibble_high(a),
            S::nibble_low(b),
            S::nibble_high(b),
            S::nibble_low(c),
            S::nibble_high(c),
            S::nibble_low(d),
            S::nibble_high(d),
        ];
        match K {
            Q5_0 | Q5K => {
                let h = S::load_b(p.add(128));
                [
                    S::with_high_bits::<0, 1>(v[0], h),
                    S::with_high_bits::<1, 1>(v[1], h),
                    S::with_high_bits::<2, 1>(v[2], h),
                    S::with_high_bits::<3, 1>(v[3], h),
                    S::with_high_bits::<4, 1>(v[4], h),
                    S::with_high_bits::<5, 1>(v[5], h),
                    S::with_high_bits::<6, 1>(v[6], h),
                    S::with_high_bits::<7, 1>(v[7], h),
                ]
            }
            Q6K => {
                let (h, i) = (S::load_b(p.add(128)), S::load_b(p.add(160)));
                [
                    S::with_high_bits::<0, 3>(v[0], h),
                    S::with_high_bits::<2, 3>(v[1], h),
                    S::with_high_bits::<4, 3>(v[2], h),
                    S::with_high_bits::<6, 3>(v[3], h),
                    S::with_high_bits::<0, 3>(v[4], i),
                    S::with_high_bits::<2, 3>(v[5], i),
                    S::with_high_bits::<4, 3>(v[6], i),
                    S::with_high_bits::<6, 3>(v[7], i),
                ]
            }
            _ => v,
        }
    }
}

/// The scales of the group at `p`; `block` is the header of its block of 256.
#[inline(always)]
unsafe fn scales<S: Simd, const K: u8>(p: *const u8, block: *const u8) -> Scales<S> {
    unsafe {
        let zero = S::splat(0.0);
        let none = (S::splat_w(0), S::splat_w(0), S::splat_w(0));
        let own = p.add(group_bytes(kind_of::<K>()) - 16);
        match K {
            Q4K | Q5K => Scales {
                d: S::mul(S::load_f16(block.cast()), S::load_u8_f(own)),
                min: S::mul(S::load_f16(block.add(16).cast()), S::load_u8_f(own.add(8))),
                pairs: none,
            },
            Q6K => Scales { d: S::load_f16(block.cast()), min: zero, pairs: S::load_pairs(own.cast()) },
            _ => Scales { d: S::load_f16(own.cast()), min: zero, pairs: none },
        }
    }
}

/// `acc + (dot of one group) · scales`, for one row of activations and an output a lane. The one definition of the arithmetic.
/// `a`: 32 codes, `scale`, `neg_sum`, `sums`: that group's.
#[inline(always)]
unsafe fn group<S: Lanes, const K: u8>(
    w: &Codes<S>,
    s: &Scales<S>,
    a: *const i8,
    scale: *const f32,
    neg_sum: *const f32,
    sums: *const i16,
    acc: S::F,
) -> S::F {
    unsafe {
        let term = |j: usize| S::maddubs(w[j], S::splat4(a.add(4 * j)));
        let ones = S::splat_w(1);
        let dot = match K {
            // Integer sums are exact, so this is what the other arms come to.
            _ if S::DOT && K != Q6K => {
                let zero = S::madd(S::splat_w(0), S::splat_w(0));
                let (mut x, mut y) = (zero, zero);
                for j in 0..4 {
                    x = S::dot(x, w[2 * j], S::splat4(a.add(8 * j)));
                    y = S::dot(y, w[2 * j + 1], S::splat4(a.add(8 * j + 4)));
                }
                S::add_i(x, y)
            }
            // Signed codes: |w| · (a with the sign of w); two products fill an i16.
            Q8_0 => {
                let term =
                    |j: usize| S::madd(S::maddubs(S::abs_b(w[j]), S::sign_b(S::splat4(a.add(4 * j)), w[j])), ones);
                let (x, y) = (S::add_i(term(0), term(1)), S::add_i(term(2), term(3)));
                let (z, u) = (S::add_i(term(4), term(5)), S::add_i(term(6), term(7)));
                S::add_i(S::add_i(x, y), S::add_i(z, u))
            }
            // Six bits: two vectors fill an i16, and the integer scale of 16 inputs goes in with `madd`.
            Q6K => {
                let (x, y) = (S::add_w(term(0), term(1)), S::add_w(term(2), term(3)));
                let (z, u) = (S::add_w(term(4), term(5)), S::add_w(term(6), term(7)));
                let low = S::add_i(S::madd(x, s.pairs.0), S::madd(y, s.pairs.0));
                let high = S::add_i(S::madd(z, s.pairs.1), S::madd(u, s.pairs.1));
                let zero = S::shl_i::<5>(S::madd(S::splat_pair(sums), s.pairs.2));
                S::sub_i(S::add_i(low, high), zero)
            }
            // Four bits: all eight vectors fit an i16 (8 · 2 · 15 · 127 = 30,480).
            Q4_0 | Q4K => {
                let (x, y) = (S::add_w(term(0), term(1)), S::add_w(term(2), term(3)));
                let (z, u) = (S::add_w(term(4), term(5)), S::add_w(term(6), term(7)));
                S::madd(S::add_w(S::add_w(x, y), S::add_w(z, u)), ones)
            }
            // Five bits: four vectors do (4 · 2 · 31 · 127 = 31,496).
            _ => {
                let (x, y) = (S::add_w(term(0), term(1)), S::add_w(term(2), term(3)));
                let (z, u) = (S::add_w(term(4), term(5)), S::add_w(term(6), term(7)));
                S::add_i(S::madd(S::add_w(x, y), ones), S::madd(S::add_w(z, u), ones))
            }
        };
        let dot = match K {
            Q4_0 => S::sub_i(dot, S::madd(S::splat_pair(sums), S::splat_w(8))),
            Q5_0 => S::sub_i(dot, S::madd(S::splat_pair(sums), S::splat_w(16))),
            // The codes were lifted to be unsigned.
            Q8_0 if S::DOT => S::sub_i(dot, S::madd(S::splat_pair(sums), S::splat_w(128))),
            _ => dot,
        };
        let acc = S::fma(S::to_f(dot), S::mul(s.d, S::splat(*scale)), acc);
        if K == Q4K || K == Q5K { S::fma(s.min, S::splat(*neg_sum), acc) } else { acc }
    }
}

/// One matrix product of several that run as one job.
#[derive(Clone, Copy)]
pub(crate) struct Product<'a> {
    pub weights: &'a Packed,
    /// [n] or none.
    pub bias: Option<&'a [f32]>,
    /// [rows, stride], written at `offset..offset + n` of each row.
    pub out: *mut f32,
    pub stride: usize,
}

unsafe impl Send for Product<'_> {}
unsafe impl Sync for Product<'_> {}

/// Rows up to which the weights are unpacked in registers for each use; above, a panel is unpacked once into a buffer.
const FUSED_ROWS: usize = 8;

/// Bytes of an unpacked group of a panel in the buffer: 8 vectors of codes, one of scales, one of minima or 3 of pairs.
const UNPACKED_GROUP: usize = 12 * 32;

/// Lanes of the longest vectors.
const LANES_MAX: usize = 16;

/// Computes panels `from..to` of one product for the first `rows` rows of `x`.
///
/// # Safety
/// The tier's CPU features; `product.out` covers the rows; no one else writes these panels' outputs.
#[inline(always)]
pub(crate) unsafe fn panels<S: Simd>(
    product: Product,
    x: &Rows,
    rows: usize,
    from: usize,
    to: usize,
    buffer: &mut Vec<u8>,
) {
    unsafe {
        match product.weights.kind {
            WeightType::Q4_0 => quantized::<S, Q4_0>(product, x, rows, from, to, buffer),
            WeightType::Q5_0 => quantized::<S, Q5_0>(product, x, rows, from, to, buffer),
            WeightType::Q8_0 => quantized::<S, Q8_0>(product, x, rows, from, to, buffer),
            WeightType::Q4K => quantized::<S, Q4K>(product, x, rows, from, to, buffer),
            WeightType::Q5K => quantized::<S, Q5K>(product, x, rows, from, to, buffer),
            WeightType::Q6K => quantized::<S, Q6K>(product, x, rows, from, to, buffer),
            WeightType::F32 => floats::<S, F32>(product, x, rows, from, to),
            WeightType::F16 => floats::<S, F16>(product, x, rows, from, to),
            WeightType::BF16 => floats::<S, BF16>(product, x, rows, from, to),
        }
    }
}

#[inline(always)]
unsafe fn quantized<S: Simd, const K: u8>(
    product: Product,
    x: &Rows,
    rows: usize,
    from: usize,
    to: usize,
    buffer: &mut Vec<u8>,
) {
    unsafe {
        if !S::WIDE || rows <= FUSED_ROWS {
            for p in from..to {
                let panel = product.weights.panel(p).as_ptr();
                let mut r = 0;
                while r < rows {
                    match rows - r {
                        _ if !S::WIDE => fused::<S, K, 1>(panel, product, x, r, p),
                        1 => fused::<S, K, 1>(panel, product, x, r, p),
                        2 => fused::<S, K, 2>(panel, product, x, r, p),
                        3 => fused::<S, K, 3>(panel, product, x, r, p),
                        _ => fused::<S, K, 4>(panel, product, x, r, p),
                    }
                    r += if S::WIDE { (rows - r).min(4) } else { 1 };
                }
            }
            return;
        }
        let side_by_side = S::Long::COUNT / PANEL;
        buffer.resize(x.k / GROUP * UNPACKED_GROUP * side_by_side + 64, 0);
        let unpacked = buffer.as_mut_ptr().add(buffer.as_ptr().align_offset(64));
        for p in (from..to).step_by(side_by_side) {
            let count = side_by_side.min(to - p);
            for i in 0..count {
                unpack_panel::<S, K>(product.weights.panel(p + i).as_ptr(), x.k, unpacked, i, side_by_side);
            }
            let outputs = count * PANEL;
            let mut r = 0;
            while r + 4 <= rows {
                buffered::<S::Long, K, 4>(unpacked, product, x, r, p, outputs);
                r += 4;
            }
            match rows - r {
                1 => buffered::<S::Long, K, 1>(unpacked, product, x, r, p, outputs),
                2 => buffered::<S::Long, K, 2>(unpacked, product, x, r, p, outputs),
                3 => buffered::<S::Long, K, 3>(unpacked, product, x, r, p, outputs),
                _ => {}
            }
        }
    }
}

/// Unpacks a panel as the `i`-th of `n` that stand side by side: each vector of the buffer has the lanes of one after the other.
#[inline(always)]
unsafe fn unpack_panel<S: Simd, const K: u8>(panel: *const u8, k: usize, unpacked: *mut u8, i: usize, n: usize) {
    unsafe {
        for g in 0..k / GROUP {
            let (at, block) = group_at::<K>(panel, g);
            let (codes, scales) = (unpack::<S, K>(at), scales::<S, K>(at, block));
            let vector = |j: usize| unpacked.add((g * UNPACKED_GROUP + 32 * j) * n + 32 * i);
            for (j, code) in codes.into_iter().enumerate() {
                S::store_b(vector(j), code);
            }
            S::store(vector(8).cast(), scales.d);
            match K {
                Q4K | Q5K => S::store(vector(9).cast(), scales.min),
                Q6K => {
                    vector(9).cast::<S::W>().write_unaligned(scales.pairs.0);
                    vector(10).cast::<S::W>().write_unaligned(scales.pairs.1);
                    vector(11).cast::<S::W>().write_unaligned(scales.pairs.2);
                }
                _ => {}
            }
        }
    }
}

/// Where group `g` of a panel is, and the header of its block.
#[inline(always)]
unsafe fn group_at<const K: u8>(panel: *const u8, g: usize) -> (*const u8, *const u8) {
    unsafe {
        let kind = kind_of::<K>();
        if header_bytes(kind) == 0 {
            return (panel.add(g * group_bytes(kind)), panel);
        }
        let block = panel.add(g / 8 * (8 * group_bytes(kind) + header_bytes(kind)));
        (block.add(header_bytes(kind) + g % 8 * group_bytes(kind)), block)
    }
}

#[inline(always)]
unsafe fn fused<S: Simd, const K: u8, const R: usize>(
    panel: *const u8,
    product: Product,
    x: &Rows,
    first: usize,
    p: usize,
) {
    unsafe {
        let groups = x.k / GROUP;
        let mut acc = [S::splat(0.0); R];
        for g in 0..groups {
            let (at, block) = group_at::<K>(panel, g);
            let (w, s) = (unpack::<S, K>(at), scales::<S, K>(at, block));
            step::<S, K, R>(&w, &s, x, first, g, &mut acc);
        }
        finish::<S, R>(product, first, p, PANEL, acc);
    }
}

/// R rows of the `outputs` outputs from panel `p` on, which are as many as there are lanes or fewer.
#[inline(always)]
unsafe fn buffered<L: Lanes, const K: u8, const R: usize>(
    unpacked: *const u8,
    product: Product,
    x: &Rows,
    first: usize,
    p: usize,
    outputs: usize,
) {
    unsafe {
        let groups = x.k / GROUP;
        let mut acc = [L::splat(0.0); R];
        let zero = L::splat_w(0);
        for g in 0..groups {
            let at = unpacked.add(g * (UNPACKED_GROUP / PANEL * L::COUNT));
            let vector = |j: usize| at.add(4 * L::COUNT * j);
            let w: Codes<L> = std::array::from_fn(|j| L::load_b(vector(j)));
            let s = Scales {
                d: L::load(vector(8).cast()),
                min: if K == Q4K || K == Q5K { L::load(vector(9).cast()) } else { L::splat(0.0) },
                pairs: if K == Q6K {
                    (L::load_w(vector(9).cast()), L::load_w(vector(10).cast()), L::load_w(vector(11).cast()))
                } else {
                    (zero, zero, zero)
                },
            };
            step::<L, K, R>(&w, &s, x, first, g, &mut acc);
        }
        finish::<L, R>(product, first, p, outputs, acc);
    }
}

/// One group for R rows.
#[inline(always)]
unsafe fn step<S: Lanes, const K: u8, const R: usize>(
    w: &Codes<S>,
    s: &Scales<S>,
    x: &Rows,
    first: usize,
    g: usize,
    acc: &mut [S::F; R],
) {
    unsafe {
        let groups = x.k / GROUP;
        for (r, acc) in acc.iter_mut().enumerate() {
            let at = (first + r) * groups + g;
            *acc = group::<S, K>(
                w,
                s,
                x.codes.as_ptr().add(at * GROUP),
                x.scales.as_ptr().add(at),
                x.neg_sums.as_ptr().add(at),
                x.sums.as_ptr().add(2 * at),
                *acc,
            );
        }
    }
}

/// Adds the bias and writes `outputs` outputs of R rows, from panel `p` on, as far as the matrix has them.
#[inline(always)]
unsafe fn finish<L: Lanes, const R: usize>(product: Product, first: usize, p: usize, outputs: usize, acc: [L::F; R]) {
    unsafe {
        let n = p * PANEL;
        let outputs = outputs.min(product.weights.n - n);
        let full = outputs == L::COUNT;
        for (r, acc) in acc.into_iter().enumerate() {
            let out = product.out.add((first + r) * product.stride + n);
            let acc = match product.bias {
                Some(bias) if full => L::add(acc, L::load(bias.as_ptr().add(n))),
                _ => acc,
            };
            if full {
                L::store(out, acc);
            } else {
                let mut lanes = [0f32; LANES_MAX];
                L::store(lanes.as_mut_ptr(), acc);
                for (i, lane) in lanes.into_iter().enumerate().take(outputs) {
                    *out.add(i) = lane + product.bias.map_or(0.0, |bias| bias[n + i]);
                }
            }
        }
    }
}

const F32: u8 = 0;
const F16: u8 = 1;
const BF16: u8 = 2;

#[inline(always)]
unsafe fn load_weights<S: Simd, const T: u8>(panel: *const u8, i: usize) -> S::F {
    unsafe {
        match T {
            F32 => S::load(panel.cast::<f32>().add(i * PANEL)),
            F16 => S::load_f16(panel.cast::<u16>().add(i * PANEL)),
            _ => S::load_bf16(panel.cast::<u16>().add(i * PANEL)),
        }
    }
}

/// Float weights: one chain of fused multiply-adds an output, over the inputs in order.
#[inline(always)]
unsafe fn floats<S: Simd, const T: u8>(product: Product, x: &Rows, rows: usize, from: usize, to: usize) {
    unsafe {
        let mut p = from;
        while p < to {
            // Several chains at once hide the latency of one.
            let wide = S::WIDE && p + 4 <= to;
            let mut r = 0;
            while r < rows {
                if !S::WIDE {
                    float_tile::<S, T, 1, 1>(product, x, r, p);
                    r += 1;
                    continue;
                }
                match (wide, rows - r) {
                    (true, 1) => float_tile::<S, T, 1, 4>(product, x, r, p),
                    (true, 2) => float_tile::<S, T, 2, 4>(product, x, r, p),
                    (true, _) => float_tile::<S, T, 3, 4>(product, x, r, p),
                    (false, 1) => float_tile::<S, T, 1, 1>(product, x, r, p),
                    (false, 2) => float_tile::<S, T, 2, 1>(product, x, r, p),
                    (false, _) => float_tile::<S, T, 3, 1>(product, x, r, p),
                }
                r += (rows - r).min(3);
            }
            p += if wide { 4 } else { 1 };
        }
    }
}

#[inline(always)]
unsafe fn float_tile<S: Simd, const T: u8, const R: usize, const P: usize>(
    product: Product,
    x: &Rows,
    first: usize,
    p: usize,
) {
    unsafe {
        let panels: [*const u8; P] = std::array::from_fn(|i| product.weights.panel(p + i).as_ptr());
        let rows: [*const f32; R] = std::array::from_fn(|r| x.floats.as_ptr().add((first + r) * x.k));
        let mut acc = [[S::splat(0.0); R]; P];
        for i in 0..x.k {
            let a: [S::F; R] = std::array::from_fn(|r| S::splat(*rows[r].add(i)));
            for (panel, acc) in panels.iter().zip(&mut acc) {
                let w = load_weights::<S, T>(*panel, i);
                for r in 0..R {
                    acc[r] = S::fma(w, a[r], acc[r]);
                }
            }
        }
        for (i, acc) in acc.into_iter().enumerate() {
            finish::<S, R>(product, first, p + i, PANEL, acc);
        }
    }
}
