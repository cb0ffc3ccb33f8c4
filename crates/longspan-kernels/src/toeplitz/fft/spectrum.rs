//! Products in the spectra of whole sequences.

use realfft::num_complex::Complex;

use crate::simd::{Real, dispatch, operation};

operation!(AddProducts, |to: &'a mut [T], x: &'a [T], y: &'a [T]| {
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
});

/// `to[i] += x[i] · y[i]`.
pub(super) fn add_products<T: Real>(to: &mut [T], x: &[T], y: &[T]) {
    dispatch(AddProducts { to, x, y })
}

// `x[i] ← x[i] · by[i]`, or by its conjugate.
// Plain loops: under the features that each table is compiled for, the compiler makes vectors of them.
operation!(MultiplySpectrum, |x: &'a mut [Complex<T>], by: &'a [Complex<T>], conjugate: bool| {
    if conjugate {
        for (x, y) in x.iter_mut().zip(by) {
            *x = Complex { re: x.re * y.re + x.im * y.im, im: x.im * y.re - x.re * y.im };
        }
    } else {
        for (x, y) in x.iter_mut().zip(by) {
            *x = Complex { re: x.re * y.re - x.im * y.im, im: x.im * y.re + x.re * y.im };
        }
    }
});

// `to[i] += conj(x[i]) · y[i]`.
operation!(AddConjugateProducts, |to: &'a mut [Complex<T>], x: &'a [Complex<T>], y: &'a [Complex<T>]| {
    for ((to, x), y) in to.iter_mut().zip(x).zip(y) {
        to.re += x.re * y.re + x.im * y.im;
        to.im += x.re * y.im - x.im * y.re;
    }
});
