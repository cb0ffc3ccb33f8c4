//! Products in the spectra of whole sequences.

use realfft::num_complex::Complex;

use crate::simd::{Operation, Real, Vector, dispatch};

/// `to[i] += x[i] · y[i]`.
pub(super) struct AddProducts<'a, T> {
    pub to: &'a mut [T],
    pub x: &'a [T],
    pub y: &'a [T],
}

impl<T: Real> Operation for AddProducts<'_, T> {
    type Element = T;
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector<Element = T>>(self) {
        let Self { to, x, y } = self;
        let whole = to.len() / V::LANES * V::LANES;
        assert!(x.len() >= to.len() && y.len() >= to.len());
        // SAFETY: `whole` numbers lie in all three slices.
        unsafe {
            let mut at = 0;
            while at < whole {
                let place = to.as_mut_ptr().add(at);
                V::load(x.as_ptr().add(at)).mul_add(V::load(y.as_ptr().add(at)), V::load(place)).store(place);
                at += V::LANES;
            }
        }
        for at in whole..to.len() {
            to[at] += x[at] * y[at];
        }
    }
}

/// `to[i] += x[i] · y[i]`.
pub(super) fn add_products<T: Real>(to: &mut [T], x: &[T], y: &[T]) {
    dispatch(AddProducts { to, x, y })
}

/// `x[i] ← x[i] · by[i]`, or by its conjugate.
pub(super) struct MultiplySpectrum<'a, T> {
    pub x: &'a mut [Complex<T>],
    pub by: &'a [Complex<T>],
    pub conjugate: bool,
}

impl<T: Real> Operation for MultiplySpectrum<'_, T> {
    type Element = T;
    type Output = ();

    // Plain loops: under the features that each table is compiled for, the compiler makes vectors of them.
    #[inline(always)]
    unsafe fn run<V: Vector<Element = T>>(self) {
        let Self { x, by, conjugate } = self;
        if conjugate {
            for (x, y) in x.iter_mut().zip(by) {
                *x = Complex { re: x.re * y.re + x.im * y.im, im: x.im * y.re - x.re * y.im };
            }
        } else {
            for (x, y) in x.iter_mut().zip(by) {
                *x = Complex { re: x.re * y.re - x.im * y.im, im: x.im * y.re + x.re * y.im };
            }
        }
    }
}

/// `to[i] += conj(x[i]) · y[i]`.
pub(super) struct AddConjugateProducts<'a, T> {
    pub to: &'a mut [Complex<T>],
    pub x: &'a [Complex<T>],
    pub y: &'a [Complex<T>],
}

impl<T: Real> Operation for AddConjugateProducts<'_, T> {
    type Element = T;
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector<Element = T>>(self) {
        let Self { to, x, y } = self;
        for ((to, x), y) in to.iter_mut().zip(x).zip(y) {
            to.re += x.re * y.re + x.im * y.im;
            to.im += x.re * y.im - x.im * y.re;
        }
    }
}
