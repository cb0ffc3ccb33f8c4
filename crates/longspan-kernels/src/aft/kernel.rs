//! AFT-conv's reparametrised kernel, `γ·(w − mean w)/std w + β` for each head, and its gradient. In doubles: it is a few
//! numbers, and the deviation of a nearly constant kernel is a difference of nearly equal ones.

use smallvec::SmallVec;

use crate::simd::Real;

/// A kernel of usual length stands on the stack: steps form theirs for every token.
type Taps = SmallVec<[f64; 64]>;

/// One head's kernel before `γ` and `β`: `(w − mean)/std` and `1/std`; all 0 where the taps are equal, as one alone is.
fn standardize<T: Real>(w: &[T]) -> (Taps, f64) {
    let taps = w.len() as f64;
    let mean = w.iter().map(|x| x.to_f64()).sum::<f64>() / taps;
    let centred: Taps = w.iter().map(|x| x.to_f64() - mean).collect();
    let deviation = (centred.iter().map(|x| x * x).sum::<f64>() / taps).sqrt();
    // Of equal taps rounding may leave a deviation.
    let inverse = if deviation == 0.0 || w.iter().all(|x| *x == w[0]) { 0.0 } else { 1.0 / deviation };
    (centred.iter().map(|x| x * inverse).collect(), inverse)
}

/// The kernels of all heads, `[heads, taps]`, in a list of the caller's kind.
pub(super) fn normalized<T: Real, K: Default + Extend<T>>(parameters: &[&[T]], taps: usize) -> K {
    let [w, gamma, beta] = [0, 1, 2].map(|n| parameters[n]);
    let mut kernels = K::default();
    for (w, (gamma, beta)) in w.chunks_exact(taps).zip(gamma.iter().zip(beta)) {
        let (unit, _) = standardize(w);
        kernels.extend(unit.into_iter().map(|x| T::from_f64(gamma.to_f64() * x + beta.to_f64())));
    }
    kernels
}

/// From the gradient of the kernels, `[heads, taps]`, those of `w`, `γ` and `β`.
///
/// With `x = (w − mean)/std`: `dγ = Σ d·x`, `dβ = Σ d`, `dw = γ/std · (d − mean d − x·mean(d·x))`.
pub(super) fn pull_back<T: Real>(parameters: &[&[T]], taps: usize, d: &[T], gradients: &mut [&mut [T]]) {
    let [w, gamma, _] = [0, 1, 2].map(|n| parameters[n]);
    for (head, (w, d)) in w.chunks_exact(taps).zip(d.chunks_exact(taps)).enumerate() {
        let (unit, inverse) = standardize(w);
        let sum = d.iter().map(|d| d.to_f64()).sum::<f64>();
        let product = d.iter().zip(&unit).map(|(d, x)| d.to_f64() * x).sum::<f64>();
        let factor = gamma[head].to_f64() * inverse;
        for ((d, x), to) in d.iter().zip(&unit).zip(&mut gradients[0][head * taps..][..taps]) {
            *to = T::from_f64(factor * (d.to_f64() - (sum + x * product) / taps as f64));
        }
        gradients[1][head] = T::from_f64(product);
        gradients[2][head] = T::from_f64(sum);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_taps_give_the_level_alone() {
        for taps in [1, 3, 15] {
            let (w, [gamma, beta]) = (vec![0.1; taps], [[2.0], [0.5]]);
            let parameters: [&[f64]; 3] = [&w, &gamma, &beta];
            assert_eq!(normalized::<f64, Vec<f64>>(&parameters, taps), vec![0.5; taps]);
            let (d, mut dw, mut d_gamma, mut d_beta) = (vec![1.5; taps], vec![9.0; taps], [9.0], [9.0]);
            pull_back(&parameters, taps, &d, &mut [&mut dw, &mut d_gamma, &mut d_beta]);
            assert_eq!((dw, d_gamma, d_beta), (vec![0.0; taps], [0.0], [1.5 * taps as f64]));
        }
    }
}
