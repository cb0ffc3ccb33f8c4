//! Half-width numbers at the border of the kernels.
//!
//! Sums along a sequence lose all digits in 8 or 11 bits, so `bf16` and `f16` tensors are widened to `f32` once (exactly),
//! everything is computed in `f32`, and outputs and gradients are rounded once. A call reads and writes two more bytes a
//! number and four than one of `f32` tensors; the wide copies are the caller's, to keep between calls.
//!
//! ```
//! use longspan_kernels::half::{bf16, narrow, widen};
//! use longspan_kernels::{Call, Dims, KernelizedAttention, Mask, Kernel, Output, Scratch, View, ViewMut};
//!
//! # fn main() -> Result<(), longspan_kernels::Error> {
//! let dims = Dims::square(1, 2, 100, 16);
//! let tokens = vec![bf16::from_f32(0.5); 3200];
//! let mut wide = vec![0.0; 3200];
//! widen(&View::contiguous(&tokens, dims.q()), dims.q(), &mut wide)?;
//!
//! let x = View::contiguous(&wide, dims.q());
//! let call = Call::new(dims, x, x, x).with_mask(Mask::causal());
//! let mut out = vec![0.0; 3200];
//! let output = Output::new(ViewMut::contiguous(&mut out, dims.out()));
//! KernelizedAttention::default().forward(&call, output, &mut Scratch::new())?;
//!
//! let mut rounded = vec![bf16::ZERO; 3200];
//! narrow(&out, dims.out(), &mut ViewMut::contiguous(&mut rounded, dims.out()))?;
//! assert!(rounded.iter().all(|x| x.to_f32() == 0.5));
//! # Ok(())
//! # }
//! ```

use ::half::slice::HalfFloatSliceExt;
pub use ::half::{bf16, f16};

use crate::call::{View, ViewMut};
use crate::error::{Error, expect};
use crate::threads::share;

/// Numbers that one task converts: enough to be worth a thread, few enough to stay in a cache.
const TASK: usize = 1 << 15;

/// `bf16` or `f16`.
pub trait Half: Copy + Send + Sync + 'static {
    /// The same numbers in `f32`; both have the same length.
    fn widen(from: &[Self], to: &mut [f32]);
    /// The nearest numbers, ties to even; both have the same length.
    fn narrow(from: &[f32], to: &mut [Self]);
}

macro_rules! half {
    ($t:ident) => {
        impl Half for $t {
            fn widen(from: &[Self], to: &mut [f32]) {
                from.convert_to_f32_slice(to);
            }
            fn narrow(from: &[f32], to: &mut [Self]) {
                to.convert_from_f32_slice(from);
            }
        }
    };
}
half!(f16);
half!(bf16);

fn check(operation: &'static str, wide: usize, shape: [usize; 4]) -> Result<(), Error> {
    let len = shape.iter().try_fold(1usize, |n, &x| n.checked_mul(x));
    let expected = || format!("as many numbers as the shape {shape:?} has");
    expect(len == Some(wide), operation, "wide", expected, || format!("{wide}"))
}

fn place(row: usize, shape: [usize; 4]) -> (usize, usize, usize) {
    (row / (shape[1] * shape[2]), row / shape[2] % shape[1], row % shape[2])
}

/// Fills `to` with the numbers of `from`, row-major `[batch, head, token, feature]`, on the threads of the call.
///
/// # Errors
/// If `from` has too few numbers for `shape`, or `to` another count.
pub fn widen<H: Half>(from: &View<'_, H>, shape: [usize; 4], to: &mut [f32]) -> Result<(), Error> {
    const OPERATION: &str = "widen";
    from.check(OPERATION, "from", shape)?;
    check(OPERATION, to.len(), shape)?;
    if let Some(from) = from.row_major(shape) {
        share(to.chunks_mut(TASK).zip(from.chunks(TASK)), |(to, from)| H::widen(from, to));
        return Ok(());
    }
    let width = shape[3];
    let rows = TASK.div_ceil(width);
    share(to.chunks_mut(rows * width).enumerate(), |(task, to)| {
        for (n, to) in to.chunks_exact_mut(width).enumerate() {
            let (batch, head, token) = place(task * rows + n, shape);
            H::widen(from.token(batch, head, token, width), to);
        }
    });
    Ok(())
}

/// Fills `to` with the numbers of `from`, row-major `[batch, head, token, feature]`, each rounded to the nearest, on the
/// threads of the call.
///
/// # Errors
/// If `to` has too few numbers for `shape`, or places that overlap, or `from` has another count.
pub fn narrow<H: Half>(from: &[f32], shape: [usize; 4], to: &mut ViewMut<'_, H>) -> Result<(), Error> {
    const OPERATION: &str = "narrow";
    to.check(OPERATION, "to", shape)?;
    check(OPERATION, from.len(), shape)?;
    if let Some(to) = to.row_major(shape) {
        share(to.chunks_mut(TASK).zip(from.chunks(TASK)), |(to, from)| H::narrow(from, to));
        return Ok(());
    }
    let width = shape[3];
    let rows = TASK.div_ceil(width);
    let to = to.shared();
    share(from.chunks(rows * width).enumerate(), |(task, from)| {
        for (n, from) in from.chunks_exact(width).enumerate() {
            let (batch, head, token) = place(task * rows + n, shape);
            // SAFETY: every row belongs to one task, which holds one at a time.
            H::narrow(from, unsafe { to.row(batch, head, token, width) });
        }
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn there_and_back_in_one<H: Half>(of: fn(u16) -> H, wide: &[f32]) {
        // The same in one piece, of tokens before heads.
        let half: Vec<H> = (0..=u16::MAX).map(of).collect();
        let mut flat = vec![f32::NAN; 1 << 16];
        let shape = [4, 128, 8, 16];
        widen(&View::contiguous(&half, shape), shape, &mut flat).unwrap();
        let row = |[batch, head, token]: [usize; 3]| &wide[((batch * 8 + head) * 128 + token) * 16..][..16];
        for (n, numbers) in flat.chunks_exact(16).enumerate() {
            let same = numbers.iter().zip(row([n / 1024, n % 8, n / 8 % 128]));
            assert!(same.into_iter().all(|(a, b)| a.to_bits() == b.to_bits()));
        }
    }

    fn there_and_back<H: Half + PartialOrd + std::fmt::Debug>(of: fn(u16) -> H) {
        // All 65,536 numbers, as tokens before heads and with a gap behind every row.
        let shape = [4, 8, 128, 16];
        let strides = [128 * 8 * 17, 17, 8 * 17];
        let mut half = vec![of(0); 4 * 128 * 8 * 17];
        for bits in 0..=u16::MAX {
            let n = usize::from(bits);
            half[n / 16 * 17 + n % 16] = of(bits);
        }
        let mut wide = vec![f32::NAN; 1 << 16];
        widen(&View::strided(&half, strides), shape, &mut wide).unwrap();
        let mut back = vec![of(0); half.len()];
        narrow(&wide, shape, &mut ViewMut::strided(&mut back, strides)).unwrap();
        let mut same = 0;
        for (a, b) in half.iter().zip(&back) {
            // NaN is the only number that differs from itself.
            let nan = |x: &H| x.partial_cmp(x).is_none();
            assert!(a == b || (nan(a) && nan(b)), "{a:?} came back as {b:?}");
            same += usize::from(a == b);
        }
        assert!(same > 60_000);
        there_and_back_in_one(of, &wide);
    }

    #[test]
    fn every_number_comes_back() {
        there_and_back(f16::from_bits);
        there_and_back(bf16::from_bits);
    }

    #[test]
    fn rounds_to_nearest() {
        let from = [1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, 1e-45, 3.4e38, f32::INFINITY];
        let mut to = [bf16::ZERO; 5];
        narrow(&from, [1, 1, 1, 5], &mut ViewMut::contiguous(&mut to, [1, 1, 1, 5])).unwrap();
        assert_eq!(to.map(bf16::to_f32), [1.0, 1.0 + 1.0 / 64.0, 0.0, f32::INFINITY, f32::INFINITY]);
        let mut to = [f16::ZERO; 5];
        narrow(&from, [1, 1, 1, 5], &mut ViewMut::contiguous(&mut to, [1, 1, 1, 5])).unwrap();
        assert_eq!(to[3], f16::INFINITY);
    }

    #[test]
    fn other_counts_are_errors() {
        let half = [f16::ONE; 6];
        let mut wide = [0.0; 7];
        let error = widen(&View::contiguous(&half, [1, 1, 2, 3]), [1, 1, 2, 3], &mut wide).unwrap_err();
        assert!(error.to_string().contains("7"), "{error}");
        let error = widen(&View::contiguous(&half, [1, 1, 1, 7]), [1, 1, 1, 7], &mut wide).unwrap_err();
        assert!(error.to_string().contains("from"), "{error}");
        let mut to = [f16::ONE; 6];
        assert!(narrow(&wide, [1, 1, 1, 7], &mut ViewMut::contiguous(&mut to, [1, 1, 1, 7])).is_err());
        assert!(narrow(&wide[..0], [0, 1, 1, 7], &mut ViewMut::contiguous(&mut to[..0], [0, 1, 1, 7])).is_ok());
    }
}
