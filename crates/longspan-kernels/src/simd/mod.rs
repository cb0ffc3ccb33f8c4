//! Vector instructions: the one place where a processor's abilities are looked at.
//!
//! [`block`] holds the operations, generic over a [`vector::Vector`]; this module compiles each of them for every
//! instruction set of the target and hands out, once a process, the table [`Ops`] for the best one the processor has.
//! `LONGSPAN_SIMD=portable|neon|avx2|avx512` forces another.

pub(crate) mod block;
pub(crate) mod log_sum;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;
pub(crate) mod rotation;
pub(crate) mod running;
pub(crate) mod softmax;
pub(crate) mod toeplitz;
mod token;
mod vector;
pub(crate) mod window;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::sync::OnceLock;

use crate::error::Error;
use crate::feature_map::FeatureMap;
use crate::shape::{Columns, Rows};
use block::{Ahead, Band, Outer, Product, Run};
use log_sum::{Factored, OutputRow, Tokens};
use realfft::num_complex::Complex;
use rotation::{Features, Rotation, Unrotated};
use running::{OutputRows, TokenGradients};
use toeplitz::Factors;
use window::{Convolution, Entering, Line, SpanTop, TapGradients, Tops};

/// An instruction set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InstructionSet {
    /// Whatever the compiler makes of plain loops.
    Portable,
    /// NEON, which every 64-bit Arm processor has.
    Neon,
    /// AVX2 with fused products.
    Avx2,
    /// AVX-512 F, DQ, BW and VL.
    Avx512,
}

impl InstructionSet {
    const ALL: [Self; 4] = [Self::Portable, Self::Neon, Self::Avx2, Self::Avx512];

    /// The name that the environment variable takes.
    pub fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Neon => "neon",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
        }
    }

    /// Whether this processor has it.
    pub fn is_available(self) -> bool {
        match self {
            Self::Portable => true,
            Self::Neon => cfg!(target_arch = "aarch64"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(not(target_arch = "x86_64"))]
            _ => false,
        }
    }

    /// The one that kernels run with in this process: the best available, or that which `LONGSPAN_SIMD` names.
    ///
    /// # Errors
    /// If the variable names none, or one that this processor lacks.
    pub fn selected() -> Result<Self, Error> {
        static SELECTED: OnceLock<Result<InstructionSet, Error>> = OnceLock::new();
        SELECTED
            .get_or_init(|| {
                let available = || Self::ALL.into_iter().filter(|set| set.is_available());
                match std::env::var("LONGSPAN_SIMD") {
                    Err(_) => Ok(available().next_back().unwrap_or(Self::Portable)),
                    Ok(name) => available().find(|set| set.name() == name).ok_or_else(|| Error::UnknownName {
                        kind: "instruction set in LONGSPAN_SIMD",
                        got: name,
                        known: available().map(Self::name).collect::<Vec<_>>().join(", "),
                    }),
                }
            })
            .clone()
    }
}

/// A number type with vector code: `f32` or `f64`.
pub trait Element: Sized + Copy + 'static {
    #[doc(hidden)]
    #[allow(private_interfaces)]
    fn ops() -> &'static Ops<Self>;
}

/// Generates the table of operations, its safe methods, and one entry a vector register.
macro_rules! operations {
    ($( $(#[$doc:meta])* $name:ident ( $($argument:ident : $type:ty),* ) $(-> $result:ty)?; )*) => {
        /// The operations of [`block`], compiled for one instruction set that this processor has.
        pub(crate) struct Ops<T: 'static> {
            $( $name: unsafe fn($($type),*) $(-> $result)?, )*
        }

        impl<T> Ops<T> {
            $(
                #[inline]
                #[allow(clippy::too_many_arguments)]
                pub fn $name(&self, $($argument: $type),*) $(-> $result)? {
                    // SAFETY: a table is only reachable where the processor has its instructions; the operations
                    // check every length they rely on.
                    unsafe { (self.$name)($($argument),*) }
                }
            )*
        }

        /// Compiles every operation for one register type under its target features.
        macro_rules! table {
            ($table:ident, $element:ty, $vector:ty, $dollar_feature:literal) => {
                mod $table {
                    use super::*;
                    type T = $element;
                    $(
                        #[target_feature(enable = $dollar_feature)]
                        #[allow(clippy::too_many_arguments)]
                        unsafe fn $name($($argument: $type),*) $(-> $result)? {
                            // SAFETY: the caller has the instructions.
                            unsafe { kernels::$name::<$vector>($($argument),*) }
                        }
                    )*
                    pub(super) static TABLE: Ops<T> = Ops { $($name),* };
                }
            };
            ($table:ident, $element:ty, $vector:ty) => {
                mod $table {
                    use super::*;
                    type T = $element;
                    $(
                        #[allow(clippy::too_many_arguments)]
                        unsafe fn $name($($argument: $type),*) $(-> $result)? {
                            // SAFETY: every processor of the target has the instructions.
                            unsafe { kernels::$name::<$vector>($($argument),*) }
                        }
                    )*
                    pub(super) static TABLE: Ops<T> = Ops { $($name),* };
                }
            };
        }
    };
}

/// The generic operations, wherever they are defined.
mod kernels {
    pub(crate) use super::block::*;
    pub(crate) use super::rotation::{add_turns, cos_sin, rates, rotate, sum_angles, unrotate};
    pub(crate) use super::running::{
        constant_cotangents, constant_gradients, constant_means, factor_tokens, join_tokens, running_gradients,
        running_means, sum_tokens, tops,
    };
    pub(crate) use super::softmax::{exp_columns, softmax_pull_back, softmax_tile};
    pub(crate) use super::toeplitz::{add_conjugate_products, add_products, multiply_spectrum, weigh};
    pub(crate) use super::token::{add_outer, add_weighed_values, feature_dots};
    pub(crate) use super::window::{
        add_row_dot, add_tap_gradients, add_window, band_weights, convolve, exp_all, gated_cotangents, gated_rows,
        key_gradients, run_rows, scale_rows, span_top, span_weights, sum_rows, window_dots, window_tops,
        window_weights,
    };
}

operations! {
    product(p: &mut Product<'_, T>);
    product_fetching(p: &mut Product<'_, T>, outer: Outer<'_, T>, ahead: &[Ahead<T>]);
    load(
        map: FeatureMap, shift: T, from: Rows<'_, T>, count: usize, width: usize, ignored: Option<&[bool]>,
        to: &mut [T], to_row: usize
    );
    pull_back(
        map: FeatureMap, x: Rows<'_, T>, phi: &[T], d: &mut [T], count: usize, width: usize, row_length: usize
    );
    store(from: &[T], factor: T, to: &mut [T]);
    transpose(from: &[T], from_row: usize, rows: usize, columns: usize, to: &mut [T], to_row: usize);
    add_column_sums(block: &[T], row_length: usize, rows: usize, to: &mut [T]);
    dot(x: &[T], y: &[T]) -> T;
    largest(x: &[T]) -> T;
    add_row_dots(block: &[T], row_length: usize, vector: &[T], to: &mut [T]);
    mask_and_sum(block: &mut [T], row_length: usize, columns: usize, band: Band, sums: &mut [T]);
    add_compensated(high: &mut [T], low: &mut [T], terms: &[T], factor: T);
    combine(to: &mut [T], a: T, x: &[T], b: T, y: &[T]);
    add_scaled(to: &mut [T], a: T, x: &[T]);
    multiply(to: &mut [T], x: &[T]);
    scale(to: &mut [T], a: T);
    add_running(sum: &mut [T], run: Run<'_, T>, to: &mut [T], to_row: usize);
    running_dots(sum: &mut [T], run: Run<'_, T>, with: &[T], with_row: usize, dots: &mut [T]);
    absorb_token(sum: &mut [T], k: &[T], v: &[T], q: &[T], out: &mut [T]);
    read_token(sum: &[T], q: &[T], out: &mut [T]);
    feature_dots(map: FeatureMap, shift: T, rows: &[T], width: usize, q: &[T], to: &mut [T]);
    add_weighed_values(rows: &[T], weights: &[T], to: &mut [T]) -> T;
    add_outer(sum: &mut [T], factor: T, x: &[T], y: &[T]);
    mask(block: &mut [T], row_length: usize, rows: usize, columns: usize, band: Band);
    all_finite(from: Rows<'_, T>, count: usize, width: usize) -> bool;
    softmax_tile(scores: &mut [T], row_length: usize, keys: usize, highest: &mut [T], sums: &mut [T], factors: &mut [T]);
    exp_columns(scores: &mut [T], row_length: usize, keys: usize, shifts: &[T]);
    softmax_pull_back(weights: &[T], d: &mut [T], row_length: usize, keys: usize, dots: &[T]);
    join(to: &mut [T], item: &[T], bias: T);
    factor_tokens(tokens: Tokens<'_, T>, reference: &mut [T], numerators: &mut [T], denominators: &mut [T]) -> T;
    sum_tokens(tokens: Tokens<'_, T>, numerators: bool, to: &mut [T]);
    join_tokens(tokens: Tokens<'_, T>, biases: &[T], mean: &mut [T]);
    tops(tokens: Tokens<'_, T>, before: &[T], tops: &mut [T]) -> bool;
    running_means(tokens: Tokens<'_, T>, tops: &[T], mean: &mut [T], to: &mut Columns<'_, T>);
    constant_means(queries: Option<Rows<'_, T>>, mean: &[T], to: &mut Columns<'_, T>);
    constant_cotangents(rows: OutputRows<'_, T>, mean: &[T], item: &mut [T], dq: &mut Columns<'_, T>);
    running_gradients(
        tokens: Tokens<'_, T>, rows: OutputRows<'_, T>, tops: &[T], before: &[T], after: &mut [T], work: &mut [T],
        dq: &mut Columns<'_, T>, to: &mut TokenGradients<'_, T>
    );
    constant_gradients(tokens: Tokens<'_, T>, rows: &[T], to: &mut TokenGradients<'_, T>);
    join_factored(to: &mut [T], from: Factored<'_, T>, biases: &[T]);
    factor(items: &[T], reference: &mut [T], numerators: &mut [T], denominators: &mut [T]) -> T;
    exponentials(block: &mut [T], row_length: usize, columns: usize, tops: &mut [T]) -> T;
    project(rows: &[T], reference: &[T], to: &mut [T], tops: &mut [T]);
    scale_by_exponents(to: &mut [T], shift: T, factors: &[T]);
    gated_mean(mean: &[T], q: &[T], out: &mut [T]);
    row_cotangent(mean: &[T], row: OutputRow<'_, T>, dq: &mut [T], item: &mut [T]);
    key_gradient(rows: &[T], key: &[T], dk: &mut [T], dv: &mut [T]);
    bias_gradient(row: &[T], key: &[T], bias: T) -> T;
    window_tops(line: Line<'_, T>, taps: &[T], tops: &mut Tops<'_, T>);
    window_weights(line: Line<'_, T>, taps: &[T], tops: &Tops<'_, T>, weights: &mut [T], sums: &mut [T]);
    add_window(weights: &[T], lanes: usize, rows: &[T], row_length: usize, outputs: usize, to: &mut [T]);
    run_rows(sum: &mut [T], run: Entering<'_, T>, share: &[T], backwards: bool, to: &mut [T]);
    window_dots(
        weights: &[T], outputs: &[T], rows: &[T], items: usize, width: usize, c: &[T], d_taps: &mut [T]
    );
    span_top(line: Line<'_, T>) -> SpanTop<T>;
    span_weights(line: Line<'_, T>, top: &SpanTop<T>, weights: &mut [T], products: &mut [T]);
    band_weights(kernel: &[T], items: &[T], products: &[T], weights: &mut [T], sums: &mut [T]);
    sum_rows(weights: &[T], rows: &[T], to: &mut [T]);
    convolve(c: &Convolution<'_, T>, before: &mut [T], after: &mut [T], to: &mut [T], ahead: &[Ahead<T>]);
    scale_rows(weights: &[T], rows: &[T], width: usize, to: &mut [T]);
    add_tap_gradients(g: &TapGradients<'_, T>, to: &mut [T], ahead: &[Ahead<T>]);
    key_gradients(
        sums: &[T], width: usize, factors: &[T], d: &[T], values: Rows<'_, T>, to: &mut TokenGradients<'_, T>
    );
    exp_all(block: &mut [T]);
    gated_rows(sums: &[T], factors: &[T], queries: Option<Rows<'_, T>>, to: &mut Columns<'_, T>);
    gated_cotangents(
        rows: OutputRows<'_, T>, factors: &[T], dq: &mut Columns<'_, T>, items: &mut [T], sums: &mut [T]
    );
    add_row_dot(sum: &[T], factor: T, v: &[T], dv: &mut [T]) -> T;
    weigh(
        tile: &mut [T], row_length: usize, columns: usize, factors: Factors<'_, T>, band: Band, sums: &mut [T]
    );
    add_products(to: &mut [T], x: &[T], y: &[T]);
    multiply_spectrum(x: &mut [Complex<T>], by: &[Complex<T>], conjugate: bool);
    add_conjugate_products(to: &mut [Complex<T>], x: &[Complex<T>], y: &[Complex<T>]);
    rates(radians: &[T], step: usize, turns: &mut [f64], rests: &mut [f64]);
    add_turns(turns: &[f64], rests: &[f64], steps: f64, to: &mut [f64]);
    cos_sin(turns: &[f64], cos: &mut [T], sin: &mut [T]);
    sum_angles(base: &[T], angle: [&[T]; 2], to: &mut [T]);
    rotate(r: &Rotation<'_, T>, x: Features<'_, T>, to: &mut [T], to_row: usize, sums: &mut [T]);
    unrotate(r: &Rotation<'_, T>, x: &[T], to: &mut Unrotated<'_, T>);
}

table!(portable_f32, f32, portable::Array<f32>);
table!(portable_f64, f64, portable::Array<f64>);
#[cfg(target_arch = "aarch64")]
table!(neon_f32, f32, neon::F32x4);
#[cfg(target_arch = "aarch64")]
table!(neon_f64, f64, neon::F64x2);
#[cfg(target_arch = "x86_64")]
table!(avx2_f32, f32, x86::F32x8, "avx2,fma");
#[cfg(target_arch = "x86_64")]
table!(avx2_f64, f64, x86::F64x4, "avx2,fma");
#[cfg(target_arch = "x86_64")]
table!(avx512_f32, f32, x86::F32x16, "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma");
#[cfg(target_arch = "x86_64")]
table!(avx512_f64, f64, x86::F64x8, "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma");

macro_rules! element {
    ($t:ident, $portable:ident, $neon:ident, $avx2:ident, $avx512:ident) => {
        impl Element for $t {
            #[allow(private_interfaces)]
            fn ops() -> &'static Ops<Self> {
                // `Mechanism::check` has reported a bad environment variable before any kernel comes here.
                match InstructionSet::selected().unwrap_or(InstructionSet::Portable) {
                    #[cfg(target_arch = "aarch64")]
                    InstructionSet::Neon => &$neon::TABLE,
                    #[cfg(target_arch = "x86_64")]
                    InstructionSet::Avx512 => &$avx512::TABLE,
                    #[cfg(target_arch = "x86_64")]
                    InstructionSet::Avx2 => &$avx2::TABLE,
                    _ => &$portable::TABLE,
                }
            }
        }
    };
}
element!(f32, portable_f32, neon_f32, avx2_f32, avx512_f32);
element!(f64, portable_f64, neon_f64, avx2_f64, avx512_f64);
