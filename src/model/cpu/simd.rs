//! Eight lanes, written once: every kernel is generic over [`Simd`], and each tier is one implementation of it.
//!
//! The portable tier is the oracle of the others: all operations used here are exact or rounded once (integer sums,
//! `mul_add`), so the tiers agree to the bit, and the tests hold them to that.

/// Vectors of a fixed number of lanes, and what a matrix product does with them.
///
/// # Safety
/// Every function needs the CPU features of its tier; pointers must be readable (writable) for the whole vector.
/// Kernels establish the first once, in the `#[target_feature]` function that they are inlined into.
pub(crate) trait Lanes: Copy + Send + Sync + 'static {
    /// Lanes of 32 bits.
    const COUNT: usize;
    /// Whether [`Lanes::dot`] is one instruction, and kernels are better off with it than with `maddubs` and `madd`.
    const DOT: bool;
    /// f32.
    type F: Copy;
    /// Four u8 or i8 a lane.
    type B: Copy;
    /// Two i16 a lane.
    type W: Copy;
    /// i32.
    type I: Copy;

    unsafe fn splat(x: f32) -> Self::F;
    unsafe fn load(p: *const f32) -> Self::F;
    unsafe fn store(p: *mut f32, x: Self::F);
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    /// a·b + c, rounded once.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    unsafe fn to_f(a: Self::I) -> Self::F;

    unsafe fn load_b(p: *const u8) -> Self::B;
    /// The four bytes at `p` in every lane.
    unsafe fn splat4(p: *const i8) -> Self::B;
    /// |x| as u8 (of −128: 128).
    unsafe fn abs_b(x: Self::B) -> Self::B;
    /// `a`, negated where `sign` is negative, 0 where it is 0.
    unsafe fn sign_b(a: Self::B, sign: Self::B) -> Self::B;
    /// Sums of adjacent products of u8 by i8, saturated to i16 (callers keep within range).
    unsafe fn maddubs(unsigned: Self::B, signed: Self::B) -> Self::W;
    /// `acc` + sums of four adjacent products of u8 by i8, as i32.
    unsafe fn dot(acc: Self::I, unsigned: Self::B, signed: Self::B) -> Self::I;
    unsafe fn add_w(a: Self::W, b: Self::W) -> Self::W;
    unsafe fn splat_w(x: i16) -> Self::W;
    unsafe fn load_w(p: *const i16) -> Self::W;
    /// Sums of adjacent products of i16 as i32.
    unsafe fn madd(a: Self::W, b: Self::W) -> Self::I;
    /// The pair of i16 at `p` in every lane.
    unsafe fn splat_pair(p: *const i16) -> Self::W;
    unsafe fn add_i(a: Self::I, b: Self::I) -> Self::I;
    unsafe fn sub_i(a: Self::I, b: Self::I) -> Self::I;
    unsafe fn shl_i<const N: i32>(a: Self::I) -> Self::I;

    /// Eight f32 at `p` for the first eight lanes, and eight that are `apart` elements further for the next.
    unsafe fn load_apart(p: *const f32, apart: usize) -> Self::F;
    /// As [`Lanes::load_apart`], of half floats.
    unsafe fn load_f16_apart(p: *const u16, apart: usize) -> Self::F;
    /// As [`Lanes::load_apart`], of i8.
    unsafe fn load_i8_apart(p: *const i8, apart: usize) -> Self::F;
}

/// The eight lanes of one kernel tier.
///
/// # Safety
/// As of [`Lanes`].
pub(crate) trait Simd: Lanes {
    /// Whether kernels are made for several rows at once. The portable tier does without: its results are the same, and
    /// its kernels take long to compile.
    const WIDE: bool;
    /// The longest vectors of the tier; a product of many rows uses them.
    type Long: Lanes;

    /// Widens 8 half floats.
    unsafe fn load_f16(p: *const u16) -> Self::F;
    /// Rounds to nearest even.
    unsafe fn store_f16(p: *mut u16, x: Self::F);
    unsafe fn load_bf16(p: *const u16) -> Self::F;
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn min(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn abs(a: Self::F) -> Self::F;
    /// To nearest, ties to even.
    unsafe fn round(a: Self::F) -> Self::I;
    /// 8 × u8 as f32.
    unsafe fn load_u8_f(p: *const u8) -> Self::F;
    /// 8 × i8 as f32.
    unsafe fn load_i8_f(p: *const i8) -> Self::F;
    /// 2ⁿ for −126 ≤ n ≤ 127.
    unsafe fn exp2i(n: Self::I) -> Self::F;

    unsafe fn store_b(p: *mut u8, x: Self::B);
    /// The low nibble of each byte.
    unsafe fn nibble_low(x: Self::B) -> Self::B;
    /// The high nibble of each byte, moved down.
    unsafe fn nibble_high(x: Self::B) -> Self::B;
    /// `base | ((plane >> SHIFT) & MASK) << 4`, a byte at a time; MASK is 1 or 3 and the bits lie within a byte.
    unsafe fn with_high_bits<const SHIFT: i32, const MASK: i8>(base: Self::B, plane: Self::B) -> Self::B;
    /// i8 as the u8 that is 128 more.
    unsafe fn lift(x: Self::B) -> Self::B;
    /// From 8 pairs of i8 `(x, y)`: the i16 vectors `(x, x)…`, `(y, y)…`, `(x, y)…`.
    unsafe fn load_pairs(p: *const i8) -> (Self::W, Self::W, Self::W);
}

/// The tier that every machine has.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

type F8 = [f32; 8];

#[inline(always)]
fn map2(a: F8, b: F8, f: impl Fn(f32, f32) -> f32) -> F8 {
    std::array::from_fn(|i| f(a[i], b[i]))
}

impl Lanes for Portable {
    const COUNT: usize = 8;
    const DOT: bool = false;
    type F = F8;
    type B = [u8; 32];
    type W = [i16; 16];
    type I = [i32; 8];

    #[inline(always)]
    unsafe fn splat(x: f32) -> F8 {
        [x; 8]
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> F8 {
        unsafe { p.cast::<F8>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, x: F8) {
        unsafe { p.cast::<F8>().write_unaligned(x) }
    }
    #[inline(always)]
    unsafe fn add(a: F8, b: F8) -> F8 {
        map2(a, b, |a, b| a + b)
    }
    #[inline(always)]
    unsafe fn mul(a: F8, b: F8) -> F8 {
        map2(a, b, |a, b| a * b)
    }
    #[inline(always)]
    unsafe fn fma(a: F8, b: F8, c: F8) -> F8 {
        std::array::from_fn(|i| a[i].mul_add(b[i], c[i]))
    }
    #[inline(always)]
    unsafe fn to_f(a: [i32; 8]) -> F8 {
        a.map(|x| x as f32)
    }
    #[inline(always)]
    unsafe fn load_b(p: *const u8) -> [u8; 32] {
        unsafe { p.cast::<[u8; 32]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn splat4(p: *const i8) -> [u8; 32] {
        let x = unsafe { p.cast::<[u8; 4]>().read_unaligned() };
        std::array::from_fn(|i| x[i % 4])
    }
    #[inline(always)]
    unsafe fn abs_b(x: [u8; 32]) -> [u8; 32] {
        x.map(|b| (b as i8).unsigned_abs())
    }
    #[inline(always)]
    unsafe fn sign_b(a: [u8; 32], sign: [u8; 32]) -> [u8; 32] {
        std::array::from_fn(|i| ((a[i] as i8).wrapping_mul((sign[i] as i8).signum())) as u8)
    }
    #[inline(always)]
    unsafe fn maddubs(u: [u8; 32], s: [u8; 32]) -> [i16; 16] {
        std::array::from_fn(|i| {
            let dot = u[2 * i] as i32 * (s[2 * i] as i8) as i32 + u[2 * i + 1] as i32 * (s[2 * i + 1] as i8) as i32;
            dot.clamp(i16::MIN as i32, i16::MAX as i32) as i16
        })
    }
    #[inline(always)]
    unsafe fn dot(acc: [i32; 8], u: [u8; 32], s: [u8; 32]) -> [i32; 8] {
        std::array::from_fn(|c| {
            let products = (4 * c..4 * c + 4).map(|i| i32::from(u[i]) * i32::from(s[i] as i8));
            acc[c].wrapping_add(products.sum())
        })
    }
    #[inline(always)]
    unsafe fn add_w(a: [i16; 16], b: [i16; 16]) -> [i16; 16] {
        std::array::from_fn(|i| a[i].wrapping_add(b[i]))
    }
    #[inline(always)]
    unsafe fn splat_w(x: i16) -> [i16; 16] {
        [x; 16]
    }
    #[inline(always)]
    unsafe fn load_w(p: *const i16) -> [i16; 16] {
        unsafe { p.cast::<[i16; 16]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn madd(a: [i16; 16], b: [i16; 16]) -> [i32; 8] {
        std::array::from_fn(|i| {
            (a[2 * i] as i32 * b[2 * i] as i32).wrapping_add(a[2 * i + 1] as i32 * b[2 * i + 1] as i32)
        })
    }
    #[inline(always)]
    unsafe fn splat_pair(p: *const i16) -> [i16; 16] {
        let x = unsafe { p.cast::<[i16; 2]>().read_unaligned() };
        std::array::from_fn(|i| x[i % 2])
    }
    #[inline(always)]
    unsafe fn add_i(a: [i32; 8], b: [i32; 8]) -> [i32; 8] {
        std::array::from_fn(|i| a[i].wrapping_add(b[i]))
    }
    #[inline(always)]
    unsafe fn sub_i(a: [i32; 8], b: [i32; 8]) -> [i32; 8] {
        std::array::from_fn(|i| a[i].wrapping_sub(b[i]))
    }
    #[inline(always)]
    unsafe fn shl_i<const N: i32>(a: [i32; 8]) -> [i32; 8] {
        a.map(|x| x << N)
    }
    #[inline(always)]
    unsafe fn load_apart(p: *const f32, _apart: usize) -> F8 {
        unsafe { Self::load(p) }
    }
    #[inline(always)]
    unsafe fn load_f16_apart(p: *const u16, _apart: usize) -> F8 {
        unsafe { Self::load_f16(p) }
    }
    #[inline(always)]
    unsafe fn load_i8_apart(p: *const i8, _apart: usize) -> F8 {
        unsafe { Self::load_i8_f(p) }
    }
}

impl Simd for Portable {
    const WIDE: bool = false;
    type Long = Self;

    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> F8 {
        let x = unsafe { p.cast::<[u16; 8]>().read_unaligned() };
        x.map(|h| half::f16::from_bits(h).to_f32())
    }
    #[inline(always)]
    unsafe fn store_f16(p: *mut u16, x: F8) {
        unsafe { p.cast::<[u16; 8]>().write_unaligned(x.map(|f| half::f16::from_f32(f).to_bits())) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> F8 {
        let x = unsafe { p.cast::<[u16; 8]>().read_unaligned() };
        x.map(|h| f32::from_bits((h as u32) << 16))
    }
    #[inline(always)]
    unsafe fn sub(a: F8, b: F8) -> F8 {
        map2(a, b, |a, b| a - b)
    }
    #[inline(always)]
    unsafe fn div(a: F8, b: F8) -> F8 {
        map2(a, b, |a, b| a / b)
    }
    // The comparisons are those of the x86 instructions: the second operand wins where they are not ordered.
    #[inline(always)]
    unsafe fn max(a: F8, b: F8) -> F8 {
        map2(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    unsafe fn min(a: F8, b: F8) -> F8 {
        map2(a, b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    unsafe fn abs(a: F8) -> F8 {
        a.map(f32::abs)
    }
    #[inline(always)]
    unsafe fn round(a: F8) -> [i32; 8] {
        // `vcvtps2dq` gives i32::MIN where the value does not fit; our callers clamp before.
        a.map(|x| x.round_ties_even() as i32)
    }
    #[inline(always)]
    unsafe fn load_u8_f(p: *const u8) -> F8 {
        unsafe { p.cast::<[u8; 8]>().read_unaligned() }.map(f32::from)
    }
    #[inline(always)]
    unsafe fn load_i8_f(p: *const i8) -> F8 {
        unsafe { p.cast::<[i8; 8]>().read_unaligned() }.map(f32::from)
    }
    #[inline(always)]
    unsafe fn exp2i(n: [i32; 8]) -> F8 {
        n.map(|n| f32::from_bits(((n + 127) as u32) << 23))
    }

    #[inline(always)]
    unsafe fn store_b(p: *mut u8, x: [u8; 32]) {
        unsafe { p.cast::<[u8; 32]>().write_unaligned(x) }
    }
    #[inline(always)]
    unsafe fn nibble_low(x: [u8; 32]) -> [u8; 32] {
        x.map(|b| b & 15)
    }
    #[inline(always)]
    unsafe fn nibble_high(x: [u8; 32]) -> [u8; 32] {
        x.map(|b| b >> 4)
    }
    #[inline(always)]
    unsafe fn with_high_bits<const SHIFT: i32, const MASK: i8>(base: [u8; 32], plane: [u8; 32]) -> [u8; 32] {
        std::array::from_fn(|i| base[i] | (((plane[i] >> SHIFT) & MASK as u8) << 4))
    }
    #[inline(always)]
    unsafe fn lift(x: [u8; 32]) -> [u8; 32] {
        x.map(|b| b ^ 0x80)
    }
    #[inline(always)]
    unsafe fn load_pairs(p: *const i8) -> ([i16; 16], [i16; 16], [i16; 16]) {
        let x = unsafe { p.cast::<[i8; 16]>().read_unaligned() };
        (
            std::array::from_fn(|i| x[i & !1] as i16),
            std::array::from_fn(|i| x[i | 1] as i16),
            std::array::from_fn(|i| x[i] as i16),
        )
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Lanes, Simd};
    use std::arch::x86_64::*;

    /// 256-bit vectors; with `VNNI` the dot products of AVX-512.
    #[derive(Clone, Copy)]
    pub(crate) struct X86<const VNNI: bool>;
    /// AVX2 with FMA and F16C (Haswell, Zen and later).
    pub(crate) type Avx2 = X86<false>;
    /// These, and of AVX-512 the instructions on short vectors and VNNI (Ice Lake, Zen 4 and later).
    pub(crate) type Avx512 = X86<true>;

    impl Avx512 {
        pub(crate) fn available() -> bool {
            Avx2::available()
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512vnni")
        }
    }

    impl Avx2 {
        pub(crate) fn available() -> bool {
            is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
        }
    }

    macro_rules! ops {
        ($(fn $name:ident $(<$(const $c:ident: $ct:ty),*>)? ($($arg:ident: $t:ty),*) $(-> $ret:ty)? { $body:expr })*) => {
            $(
                #[inline(always)]
                unsafe fn $name $(<$(const $c: $ct),*>)? ($($arg: $t),*) $(-> $ret)? { unsafe { $body } }
            )*
        };
    }

    /// What the two tiers of 256-bit vectors have in common.
    macro_rules! simd_of_x86 {
        () => {
        const WIDE: bool = true;

        ops! {
            fn load_f16(p: *const u16) -> __m256 { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
            fn store_f16(p: *mut u16, x: __m256) { _mm_storeu_si128(p.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x)) }
            fn load_bf16(p: *const u16) -> __m256 {
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()))))
            }
            fn sub(a: __m256, b: __m256) -> __m256 { _mm256_sub_ps(a, b) }
            fn div(a: __m256, b: __m256) -> __m256 { _mm256_div_ps(a, b) }
            fn max(a: __m256, b: __m256) -> __m256 { _mm256_max_ps(a, b) }
            fn min(a: __m256, b: __m256) -> __m256 { _mm256_min_ps(a, b) }
            fn abs(a: __m256) -> __m256 { _mm256_andnot_ps(_mm256_set1_ps(-0.0), a) }
            fn round(a: __m256) -> __m256i { _mm256_cvtps_epi32(a) }
            fn load_u8_f(p: *const u8) -> __m256 { _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast()))) }
            fn load_i8_f(p: *const i8) -> __m256 { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast()))) }
            fn load_pairs(p: *const i8) -> (__m256i, __m256i, __m256i) {
                {
                    let xy = _mm256_cvtepi8_epi16(_mm_loadu_si128(p.cast()));
                    let xx = _mm256_blend_epi16::<0xAA>(xy, _mm256_slli_epi32::<16>(xy));
                    let yy = _mm256_blend_epi16::<0xAA>(_mm256_srli_epi32::<16>(xy), xy);
                    (xx, yy, xy)
                }
            }
            fn exp2i(n: __m256i) -> __m256 {
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(n, _mm256_set1_epi32(127))))
            }
            fn store_b(p: *mut u8, x: __m256i) { _mm256_storeu_si256(p.cast(), x) }
            fn nibble_low(x: __m256i) -> __m256i { _mm256_and_si256(x, _mm256_set1_epi8(15)) }
            fn nibble_high(x: __m256i) -> __m256i { _mm256_and_si256(_mm256_srli_epi16::<4>(x), _mm256_set1_epi8(15)) }
            fn lift(x: __m256i) -> __m256i { _mm256_xor_si256(x, _mm256_set1_epi8(-128)) }
        }

        #[inline(always)]
        unsafe fn with_high_bits<const SHIFT: i32, const MASK: i8>(base: __m256i, plane: __m256i) -> __m256i {
            // Bits SHIFT.. of each byte go to bits 4..; 16-bit shifts drag in a neighbour's bits, which the mask drops.
            unsafe {
                let mask = _mm256_set1_epi8(MASK << 4);
                let moved = match SHIFT {
                    0 => _mm256_slli_epi16::<4>(plane),
                    1 => _mm256_slli_epi16::<3>(plane),
                    2 => _mm256_slli_epi16::<2>(plane),
                    3 => _mm256_slli_epi16::<1>(plane),
                    4 => plane,
                    5 => _mm256_srli_epi16::<1>(plane),
                    6 => _mm256_srli_epi16::<2>(plane),
                    _ => _mm256_srli_epi16::<3>(plane),
                };
                _mm256_or_si256(base, _mm256_and_si256(moved, mask))
            }
        }
        };
    }

    impl<const VNNI: bool> Lanes for X86<VNNI> {
        const COUNT: usize = 8;
        const DOT: bool = VNNI;
        type F = __m256;
        type B = __m256i;
        type W = __m256i;
        type I = __m256i;

        ops! {
            fn splat(x: f32) -> __m256 { _mm256_set1_ps(x) }
            fn load(p: *const f32) -> __m256 { _mm256_loadu_ps(p) }
            fn store(p: *mut f32, x: __m256) { _mm256_storeu_ps(p, x) }
            fn add(a: __m256, b: __m256) -> __m256 { _mm256_add_ps(a, b) }
            fn mul(a: __m256, b: __m256) -> __m256 { _mm256_mul_ps(a, b) }
            fn fma(a: __m256, b: __m256, c: __m256) -> __m256 { _mm256_fmadd_ps(a, b, c) }
            fn to_f(a: __m256i) -> __m256 { _mm256_cvtepi32_ps(a) }
            fn load_b(p: *const u8) -> __m256i { _mm256_loadu_si256(p.cast()) }
            fn splat4(p: *const i8) -> __m256i { _mm256_set1_epi32(p.cast::<i32>().read_unaligned()) }
            fn abs_b(x: __m256i) -> __m256i { _mm256_abs_epi8(x) }
            fn sign_b(a: __m256i, sign: __m256i) -> __m256i { _mm256_sign_epi8(a, sign) }
            fn maddubs(unsigned: __m256i, signed: __m256i) -> __m256i { _mm256_maddubs_epi16(unsigned, signed) }
            fn dot(acc: __m256i, unsigned: __m256i, signed: __m256i) -> __m256i { _mm256_dpbusd_epi32(acc, unsigned, signed) }
            fn add_w(a: __m256i, b: __m256i) -> __m256i { _mm256_add_epi16(a, b) }
            fn splat_w(x: i16) -> __m256i { _mm256_set1_epi16(x) }
            fn load_w(p: *const i16) -> __m256i { _mm256_loadu_si256(p.cast()) }
            fn madd(a: __m256i, b: __m256i) -> __m256i { _mm256_madd_epi16(a, b) }
            fn splat_pair(p: *const i16) -> __m256i { _mm256_set1_epi32(p.cast::<i32>().read_unaligned()) }
            fn add_i(a: __m256i, b: __m256i) -> __m256i { _mm256_add_epi32(a, b) }
            fn sub_i(a: __m256i, b: __m256i) -> __m256i { _mm256_sub_epi32(a, b) }
            fn shl_i<const N: i32>(a: __m256i) -> __m256i { _mm256_slli_epi32::<N>(a) }
            fn load_apart(p: *const f32, _apart: usize) -> __m256 { _mm256_loadu_ps(p) }
            fn load_f16_apart(p: *const u16, _apart: usize) -> __m256 { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
            fn load_i8_apart(p: *const i8, _apart: usize) -> __m256 {
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast())))
            }
        }
    }

    impl Simd for Avx2 {
        type Long = Self;
        simd_of_x86!();
    }
    impl Simd for Avx512 {
        type Long = Zmm;
        simd_of_x86!();
    }

    /// 512-bit vectors: sixteen lanes.
    #[derive(Clone, Copy)]
    pub(crate) struct Zmm;

    impl Lanes for Zmm {
        const COUNT: usize = 16;
        const DOT: bool = true;
        type F = __m512;
        type B = __m512i;
        type W = __m512i;
        type I = __m512i;

        ops! {
            fn splat(x: f32) -> __m512 { _mm512_set1_ps(x) }
            fn load(p: *const f32) -> __m512 { _mm512_loadu_ps(p) }
            fn store(p: *mut f32, x: __m512) { _mm512_storeu_ps(p, x) }
            fn add(a: __m512, b: __m512) -> __m512 { _mm512_add_ps(a, b) }
            fn mul(a: __m512, b: __m512) -> __m512 { _mm512_mul_ps(a, b) }
            fn fma(a: __m512, b: __m512, c: __m512) -> __m512 { _mm512_fmadd_ps(a, b, c) }
            fn to_f(a: __m512i) -> __m512 { _mm512_cvtepi32_ps(a) }
            fn load_b(p: *const u8) -> __m512i { _mm512_loadu_si512(p.cast()) }
            fn splat4(p: *const i8) -> __m512i { _mm512_set1_epi32(p.cast::<i32>().read_unaligned()) }
            fn abs_b(x: __m512i) -> __m512i { _mm512_abs_epi8(x) }
            fn sign_b(a: __m512i, sign: __m512i) -> __m512i {
                {
                    let negative = _mm512_movepi8_mask(sign);
                    let signed = _mm512_mask_sub_epi8(a, negative, _mm512_setzero_si512(), a);
                    _mm512_maskz_mov_epi8(_mm512_test_epi8_mask(sign, sign), signed)
                }
            }
            fn maddubs(unsigned: __m512i, signed: __m512i) -> __m512i { _mm512_maddubs_epi16(unsigned, signed) }
            fn dot(acc: __m512i, unsigned: __m512i, signed: __m512i) -> __m512i { _mm512_dpbusd_epi32(acc, unsigned, signed) }
            fn add_w(a: __m512i, b: __m512i) -> __m512i { _mm512_add_epi16(a, b) }
            fn splat_w(x: i16) -> __m512i { _mm512_set1_epi16(x) }
            fn load_w(p: *const i16) -> __m512i { _mm512_loadu_si512(p.cast()) }
            fn madd(a: __m512i, b: __m512i) -> __m512i { _mm512_madd_epi16(a, b) }
            fn splat_pair(p: *const i16) -> __m512i { _mm512_set1_epi32(p.cast::<i32>().read_unaligned()) }
            fn add_i(a: __m512i, b: __m512i) -> __m512i { _mm512_add_epi32(a, b) }
            fn sub_i(a: __m512i, b: __m512i) -> __m512i { _mm512_sub_epi32(a, b) }
            fn shl_i<const N: i32>(a: __m512i) -> __m512i { _mm512_sll_epi32(a, _mm_cvtsi32_si128(N)) }
            fn load_apart(p: *const f32, apart: usize) -> __m512 {
                {
                    let low = _mm512_castsi256_si512(_mm256_loadu_si256(p.cast()));
                    _mm512_castsi512_ps(_mm512_inserti64x4::<1>(low, _mm256_loadu_si256(p.add(apart).cast())))
                }
            }
            fn load_f16_apart(p: *const u16, apart: usize) -> __m512 {
                _mm512_cvtph_ps(_mm256_set_m128i(_mm_loadu_si128(p.add(apart).cast()), _mm_loadu_si128(p.cast())))
            }
            fn load_i8_apart(p: *const i8, apart: usize) -> __m512 {
                {
                    let both = _mm_unpacklo_epi64(_mm_loadl_epi64(p.cast()), _mm_loadl_epi64(p.add(apart).cast()));
                    _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(both))
                }
            }
        }
    }
}
