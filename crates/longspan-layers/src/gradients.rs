//! What is done to all gradients between a backward and a step of the optimizer: sums, their norm, a factor. On all threads, the
//! same bits for any number of them.

use longspan_core::error::{Error, expect};
use longspan_core::simd::block::add_scaled;
use longspan_core::simd::rows::{load_part, store_part};
use longspan_core::simd::{dispatch, operation};
use longspan_core::threads::share_many;

/// Numbers of a task: 64 kB, which a first- or second-level cache holds.
const PIECE: usize = 1 << 14;

/// `Σ x²`. Each piece is summed in `f32`, or where that has no place for it in `f64`, as the pieces are.
pub fn sum_of_squares(x: &[f32]) -> f64 {
    let mut sums = vec![0.0; x.len().div_ceil(PIECE)];
    share_many(x.len(), x.chunks(PIECE).zip(&mut sums), |(x, sum)| {
        *sum = dispatch(Squares { x });
        if !sum.is_finite() {
            *sum = x.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
        }
    });
    sums.iter().sum()
}

/// `to += x`.
///
/// # Errors
/// Lengths that differ.
pub fn add(to: &mut [f32], x: &[f32]) -> Result<(), Error> {
    let len = to.len();
    expect(x.len() == len, "add", "x", || format!("{len} numbers"), || x.len().to_string())?;
    share_many(len, to.chunks_mut(PIECE).zip(x.chunks(PIECE)), |(to, x)| add_scaled(to, 1.0, x));
    Ok(())
}

/// `x ← a x`.
pub fn scale(x: &mut [f32], a: f32) {
    share_many(x.len(), x.chunks_mut(PIECE), |x| dispatch(Scale { x, a }));
}

operation!(Squares, f32, |x: &'a [f32]| -> f64 {
    // SAFETY: forwarded to the caller; parts are checked where they are read, and filled up with zeros.
    unsafe {
        let mut sums = [V::splat(0.0); 4];
        for (n, at) in (0..x.len()).step_by(V::LANES).enumerate() {
            let x = load_part::<V>(x, at);
            sums[n % 4] = x.mul_add(x, sums[n % 4]);
        }
        f64::from(sums[0].add(sums[1]).add(sums[2].add(sums[3])).sum())
    }
});

operation!(Scale, f32, |x: &'a mut [f32], a: f32| {
    for at in (0..x.len()).step_by(V::LANES) {
        // SAFETY: forwarded to the caller; parts are checked where they are read and written.
        unsafe { store_part(load_part::<V>(x, at).mul(V::splat(a)), x, at) };
    }
});

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_numbers_count_once_whatever_the_length() {
        for len in [0, 1, 17, PIECE, 3 * PIECE + 5] {
            let x: Vec<f32> = (0..len).map(|n| (n % 13) as f32 - 6.0).collect();
            let exact: f64 = x.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
            assert!((sum_of_squares(&x) - exact).abs() <= 1e-6 * exact, "{len}");
            let mut sum = x.clone();
            add(&mut sum, &x).unwrap();
            scale(&mut sum, 0.25);
            assert!(sum.iter().zip(&x).all(|(sum, x)| *sum == 0.5 * x), "{len}");
            assert!(add(&mut sum, &vec![0.0; len + 1]).is_err());
        }
        assert!(sum_of_squares(&[f32::NAN]).is_nan());
        assert_eq!(sum_of_squares(&[f32::MAX, 1.0]), f64::from(f32::MAX).powi(2));
    }
}
