//! Products in the spectra of whole sequences.

use realfft::num_complex::Complex;

use crate::simd::operation;

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
