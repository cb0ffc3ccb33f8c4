//! Activations of single numbers, and their slopes.

use std::mem::MaybeUninit;

use longspan_core::simd::rows::{load_part, store_part};
use longspan_core::simd::{Real, Vector, operation, sigmoid, silu};

/// What a linear layer does to each of its sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Activation {
    /// `x`.
    #[default]
    Identity,
    /// `max(x, 0)`.
    Relu,
    /// `x Φ(x)`, with the normal distribution's `Φ(x) = (1 + erf(x/√2)) / 2`.
    Gelu,
    /// `x σ(2u)` with `u = √(2/π) (x + 0.044715 x³)`: what is known as GELU's approximation by tanh.
    GeluTanh,
    /// `x σ(x)`, with `σ(x) = 1 / (1 + e⁻ˣ)`.
    Silu,
}

/// `√(8/π)`: twice the factor of GELU's approximation.
const TANH_SCALE: f64 = 1.595_769_121_605_730_7;
const TANH_CUBE: f64 = 0.044_715;

impl Activation {
    /// Every activation.
    pub const ALL: [Self; 5] = [Self::Identity, Self::Relu, Self::Gelu, Self::GeluTanh, Self::Silu];

    /// The definition.
    pub fn apply(self, x: f64) -> f64 {
        match self {
            Self::Identity => x,
            Self::Relu => x.max(0.0),
            Self::Gelu => 0.5 * x * libm::erfc(-x * std::f64::consts::FRAC_1_SQRT_2),
            Self::GeluTanh => x / (1.0 + (-TANH_SCALE * (x + TANH_CUBE * x * x * x)).exp()),
            Self::Silu => x / (1.0 + (-x).exp()),
        }
    }

    /// Its slope; 0 for ReLU at 0.
    pub fn slope(self, x: f64) -> f64 {
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        match self {
            Self::Identity => 1.0,
            Self::Relu => f64::from(x > 0.0),
            Self::Gelu => {
                let density = (-0.5 * x * x).exp() / std::f64::consts::TAU.sqrt();
                0.5 * libm::erfc(-x * std::f64::consts::FRAC_1_SQRT_2) + x * density
            }
            Self::GeluTanh => {
                let s = sigmoid(TANH_SCALE * (x + TANH_CUBE * x * x * x));
                s + x * s * (1.0 - s) * TANH_SCALE * (1.0 + 3.0 * TANH_CUBE * x * x)
            }
            Self::Silu => {
                let s = sigmoid(x);
                s + x * s * (1.0 - s)
            }
        }
    }

    /// Whether the slope can be told from the result: then a backward needs nothing else.
    pub(super) fn slope_is_in_result(self) -> bool {
        matches!(self, Self::Identity | Self::Relu)
    }
}

/// `Φ(x)` and `e^{−x²/2}`.
///
/// `erfc(z) = e^{−z²} t p(t)` with `t = 1/(1 + 0.36 z)` for `z ≥ 0`, where `p` interpolates at Chebyshev's nodes: relative error
/// 5e-8, in `f32` 4e-7 of a number below 1/2.
#[inline(always)]
unsafe fn normal<V: Vector>(x: V) -> (V, V) {
    const SLOPE: f64 = 0.36;
    const P: [f64; 10] = [
        0.203_108_255_555_723_32,
        0.203_107_565_942_289_46,
        0.189_953_297_947_077_05,
        0.163_787_510_479_667_66,
        0.123_719_952_683_918_72,
        0.103_917_468_414_387_15,
        -0.023_798_395_925_455_323,
        0.138_278_711_791_970_27,
        -0.139_056_478_633_900_7,
        0.036_982_136_446_867_195,
    ];
    // SAFETY: forwarded to the caller.
    unsafe {
        let constant = |x: f64| V::splat(V::Element::from_f64(x));
        let (one, half) = (constant(1.0), constant(0.5));
        let exp = x.mul(x).mul(constant(-0.5)).exp_nonpositive();
        let t = one.div(x.abs().mul_add(constant(SLOPE * std::f64::consts::FRAC_1_SQRT_2), one));
        let mut p = constant(P[P.len() - 1]);
        for &c in P[..P.len() - 1].iter().rev() {
            p = p.mul_add(t, constant(c));
        }
        let tail = p.mul(t).mul(exp).mul(half);
        (x.if_positive(one.sub(tail), tail), exp)
    }
}

/// The activation and, if wanted, its slope.
#[inline(always)]
pub(super) unsafe fn value_and_slope<V: Vector>(activation: Activation, x: V) -> (V, V) {
    // SAFETY: forwarded to the caller.
    unsafe {
        let constant = |x: f64| V::splat(V::Element::from_f64(x));
        let (zero, one) = (constant(0.0), constant(1.0));
        match activation {
            Activation::Identity => (x, one),
            // NaN stays NaN, as in `f64::max` it would not.
            Activation::Relu => (x.if_positive(x, zero.mul(x)), x.if_positive(one, zero)),
            Activation::Gelu => {
                let (phi, exp) = normal(x);
                let density = exp.mul(constant(1.0 / std::f64::consts::TAU.sqrt()));
                (x.mul(phi), x.mul_add(density, phi))
            }
            Activation::GeluTanh => {
                let square = x.mul(x);
                let s = sigmoid(square.mul_add(constant(TANH_CUBE), one).mul(x).mul(constant(TANH_SCALE)));
                let inner = square.mul_add(constant(3.0 * TANH_CUBE * TANH_SCALE), constant(TANH_SCALE));
                (x.mul(s), x.mul(s).mul(one.sub(s)).mul_add(inner, s))
            }
            Activation::Silu => silu(x),
        }
    }
}

/// One loop for each activation, in which it is a constant.
macro_rules! for_each_activation {
    ($activation:expr, $constant:ident => $loop:expr) => {
        for_each_activation!($activation, $constant => $loop, Identity Relu Gelu GeluTanh Silu)
    };
    ($activation:expr, $constant:ident => $loop:expr, $($name:ident)*) => {
        match $activation {
            $(Activation::$name => {
                const $constant: Activation = Activation::$name;
                $loop
            })*
        }
    };
}

// Adds a bias, one row, to each row of sums, and writes what the activation makes of them to `to`, or in their place.
operation!(Activate, f32, |activation: Activation,
                           sums: &'a mut [f32],
                           bias: Option<&'a [f32]>,
                           width: usize,
                           to: Option<&'a mut [MaybeUninit<f32>]>| {
    let mut to = to;
    assert!(width > 0 && bias.is_none_or(|bias| bias.len() == width));
    assert!(to.as_ref().is_none_or(|to| to.len() == sums.len()));
    // SAFETY: forwarded to the caller; parts of rows are checked where they are read.
    for_each_activation!(activation, ACTIVATION => unsafe {
        for (n, sums) in sums.chunks_exact_mut(width).enumerate() {
            for column in (0..width).step_by(V::LANES) {
                let mut x = load_part::<V>(sums, column);
                if let Some(bias) = bias {
                    x = x.add(load_part(bias, column));
                }
                let (y, _) = value_and_slope(ACTIVATION, x);
                match &mut to {
                    None => store_part(y, sums, column),
                    Some(to) => {
                        store_part(x, sums, column);
                        store_fresh(y, &mut to[n * width..][..width], column);
                    }
                }
            }
        }
    });
});

/// [`store_part`] to numbers that are not there yet.
#[inline(always)]
unsafe fn store_fresh<V: Vector<Element = f32>>(register: V, row: &mut [MaybeUninit<f32>], column: usize) {
    let row = &mut row[column..];
    let to = row.as_mut_ptr().cast();
    // SAFETY: no more is written than there is room for.
    unsafe { if row.len() >= V::LANES { register.store(to) } else { register.store_first(to, row.len()) } }
}

// Multiplies gradients by the slope of the activation at `at`: its argument, or its result where that tells the slope.
operation!(PullBack, f32, |activation: Activation, at: &'a [f32], d: &'a mut [f32]| {
    if activation == Activation::Identity {
        return;
    }
    assert!(at.len() == d.len());
    // SAFETY: forwarded to the caller; parts of rows are checked where they are read.
    for_each_activation!(activation, ACTIVATION => unsafe {
        for column in (0..d.len()).step_by(V::LANES) {
            let (_, slope) = value_and_slope(ACTIVATION, load_part::<V>(at, column));
            let product = load_part::<V>(d, column).mul(slope);
            store_part(product, d, column);
        }
    });
});

// Writes the activations of sums and multiplies gradients by their slopes, in one pass: for a backward that needs both. `d` is
// the gradient of the activations, and becomes that of the sums.
operation!(Revisit, f32, |activation: Activation,
                          sums: &'a [f32],
                          d: &'a mut [f32],
                          to: &'a mut [MaybeUninit<f32>]| {
    assert!(sums.len() == d.len() && sums.len() == to.len());
    // SAFETY: forwarded to the caller; parts of rows are checked where they are read.
    for_each_activation!(activation, ACTIVATION => unsafe {
        for column in (0..d.len()).step_by(V::LANES) {
            let (y, slope) = value_and_slope(ACTIVATION, load_part::<V>(sums, column));
            store_fresh(y, to, column);
            store_part(load_part::<V>(d, column).mul(slope), d, column);
        }
    });
});

// Adds a bias to rows `[a, b]` of sums, each half `width` long, and writes `f(a) ⊙ b`.
operation!(Gate, f32, |activation: Activation,
                       sums: &'a mut [f32],
                       bias: Option<&'a [f32]>,
                       width: usize,
                       to: &'a mut [MaybeUninit<f32>]| {
    assert!(width > 0 && bias.is_none_or(|bias| bias.len() == 2 * width) && 2 * to.len() == sums.len());
    // SAFETY: forwarded to the caller; parts of rows are checked where they are read.
    for_each_activation!(activation, ACTIVATION => unsafe {
        for (sums, to) in sums.chunks_exact_mut(2 * width).zip(to.chunks_exact_mut(width)) {
            if let Some(bias) = bias {
                add_row::<V>(sums, bias);
            }
            let (a, b) = sums.split_at(width);
            for column in (0..width).step_by(V::LANES) {
                let (y, _) = value_and_slope(ACTIVATION, load_part::<V>(a, column));
                store_fresh(y.mul(load_part(b, column)), to, column);
            }
        }
    });
});

/// `row += other`.
#[inline(always)]
unsafe fn add_row<V: Vector<Element = f32>>(row: &mut [f32], other: &[f32]) {
    for column in (0..row.len()).step_by(V::LANES) {
        // SAFETY: forwarded to the caller; parts of rows are checked where they are read.
        unsafe { store_part(load_part::<V>(row, column).add(load_part(other, column)), row, column) };
    }
}

// [`Revisit`] of what [`Gate`] writes: `d` is the gradient of that, and `d_sums` becomes the gradient of the sums with their bias.
operation!(RevisitGate, f32, |activation: Activation,
                              sums: &'a [f32],
                              width: usize,
                              d: &'a [f32],
                              d_sums: &'a mut [MaybeUninit<f32>],
                              to: &'a mut [MaybeUninit<f32>]| {
    assert!(width > 0 && sums.len() == 2 * d.len() && d_sums.len() == sums.len() && to.len() == d.len());
    // SAFETY: forwarded to the caller; parts of rows are checked where they are read.
    for_each_activation!(activation, ACTIVATION => unsafe {
        let rows = sums.chunks_exact(2 * width).zip(d.chunks_exact(width));
        let out = d_sums.chunks_exact_mut(2 * width).zip(to.chunks_exact_mut(width));
        for ((sums, d), (d_sums, to)) in rows.zip(out) {
            let ((a, b), (d_a, d_b)) = (sums.split_at(width), d_sums.split_at_mut(width));
            for column in (0..width).step_by(V::LANES) {
                let (y, slope) = value_and_slope(ACTIVATION, load_part::<V>(a, column));
                let (b, d) = (load_part::<V>(b, column), load_part::<V>(d, column));
                store_fresh(y.mul(b), to, column);
                store_fresh(d.mul(b).mul(slope), d_a, column);
                store_fresh(d.mul(y), d_b, column);
            }
        }
    });
});

#[cfg(test)]
mod tests {
    use super::*;
    use longspan_core::simd::dispatch;

    #[test]
    fn values_and_slopes_are_those_of_the_definition() {
        let x: Vec<f32> = (-4000..=4000).map(|n| n as f32 / 300.0).chain([0.0, -0.0, 1e-20, 30.0, -30.0]).collect();
        for activation in Activation::ALL {
            let (mut sums, mut y) = (x.clone(), vec![MaybeUninit::new(f32::NAN); x.len()]);
            let width = x.len();
            dispatch(Activate { activation, sums: &mut sums, bias: None, width, to: Some(&mut y) });
            // SAFETY: they were numbers from the beginning.
            let y: Vec<f32> = y.into_iter().map(|y| unsafe { y.assume_init() }).collect();
            assert_eq!(sums, x);
            let mut d = vec![1.0; x.len()];
            dispatch(PullBack { activation, at: &x, d: &mut d });
            for (n, &x) in x.iter().enumerate() {
                let x = f64::from(x);
                // A unit in the last place of the largest term, and half of one of x.
                let allowed = 4.0 * f64::from(f32::EPSILON) * x.abs().max(1.0);
                let (value, slope) = (activation.apply(x), activation.slope(x));
                assert!((f64::from(y[n]) - value).abs() <= allowed, "{activation:?} at {x}: {}, not {value}", y[n]);
                assert!((f64::from(d[n]) - slope).abs() <= allowed, "{activation:?}' at {x}: {}, not {slope}", d[n]);
            }
        }
    }

    #[test]
    fn a_bias_is_added_to_every_row_of_any_width() {
        for width in [1, 3, 16, 17, 40] {
            let bias: Vec<f32> = (0..width).map(|n| n as f32).collect();
            let mut sums = vec![-1.0; 3 * width];
            dispatch(Activate { activation: Activation::Relu, sums: &mut sums, bias: Some(&bias), width, to: None });
            for (n, &y) in sums.iter().enumerate() {
                assert_eq!(y, ((n % width) as f32 - 1.0).max(0.0));
            }
        }
    }
}
