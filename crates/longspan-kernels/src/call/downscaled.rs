//! Gradients where a row's denominator is so small that its gradient divided by it overflows, as after a gap that a decay has all but
//! erased: gradients are linear in what they start from, so all of it is made smaller first and all of them larger in the end.

use super::{Cotangent, Dims, GradientSink, Gradients, State, View, ViewMut};
use crate::error::Error;
use crate::simd::Real;
use crate::simd::block::scale_by;

/// Runs a checked backward on what it starts from, made smaller where that is needed; where it `divides`, there is one denominator
/// a row.
pub(crate) fn downscaled<T: Real>(
    dims: &Dims,
    divides: bool,
    cotangent: &Cotangent<'_, T>,
    gradients: Gradients<'_, '_, T>,
    backward: impl FnOnce(&Cotangent<'_, T>, GradientSink<'_, T>, &mut [&mut [T]], Option<&mut State<T>>),
) -> Result<(), Error> {
    let Gradients { mut dq, mut dk, mut dv, parameters, mut initial_state } = gradients;
    let small = if divides { Downscaled::new(dims, cotangent)? } else { None };
    let cotangent = small.as_ref().map_or(*cotangent, |small| small.cotangent(dims, cotangent));
    let sink = GradientSink { dq: dq.shared(), dk: dk.shared(), dv: dv.shared() };
    backward(&cotangent, sink, parameters, initial_state.as_deref_mut());
    if let Some(small) = &small {
        let tensors = [(&mut dq, dims.q()), (&mut dk, dims.k()), (&mut dv, dims.v())];
        small.restore(tensors, parameters, initial_state);
    }
    Ok(())
}

/// What a backward starts from, multiplied by a power of two.
struct Downscaled<T> {
    /// Its inverse.
    inverse: T,
    d_out: Vec<T>,
    final_state: Option<State<T>>,
}

impl<T: Real> Downscaled<T> {
    /// `None` where nothing comes near the largest number of the type.
    fn new(dims: &Dims, cotangent: &Cotangent<'_, T>) -> Result<Option<Self>, Error> {
        let least = T::MIN_POSITIVE.to_f64();
        // Above it only gradients of 2⁴⁰ and more would come so far, which are none.
        let small = T::from_f64(least * 2f64.powi(66));
        let tiny = |denominator: T| !denominator.vanishes() && denominator.abs() < small;
        if !cotangent.denominators.iter().any(|&denominator| tiny(denominator)) {
            return Ok(None);
        }
        let rows = rows(dims.out());
        let d_out = |[batch, head, token]: [usize; 3]| cotangent.d_out.rows(batch, head).row(token, dims.value_dim);
        let largest = |place| d_out(place).iter().map(|x| x.abs()).filter(|x| x.is_finite()).fold(T::ZERO, T::max);
        let exponents = rows.clone().zip(cotangent.denominators).filter(|(_, denominator)| tiny(**denominator));
        let exponents =
            exponents.map(|(place, denominator)| largest(place).to_f64().log2() - denominator.abs().to_f64().log2());
        // Rows are summed and multiplied by features, for which 2²⁶ are left.
        let excess = exponents.fold(f64::NEG_INFINITY, f64::max) + least.log2() + 26.0;
        if excess <= 0.0 {
            return Ok(None);
        }
        let exponent = (excess.ceil() as i32).min(-(least.log2() as i32) - 26);
        let factor = T::from_f64(2f64.powi(-exponent));
        let mut numbers = Vec::with_capacity(dims.out().iter().product());
        rows.for_each(|place| numbers.extend_from_slice(d_out(place)));
        scale_by(&mut numbers, factor);
        let mut final_state = cotangent.final_state.map(State::try_clone).transpose()?;
        if let Some(state) = &mut final_state {
            scale_by(state.numbers_mut(), factor);
        }
        Ok(Some(Self { inverse: T::from_f64(2f64.powi(exponent)), d_out: numbers, final_state }))
    }

    /// What to start from instead.
    fn cotangent<'a>(&'a self, dims: &Dims, cotangent: &Cotangent<'a, T>) -> Cotangent<'a, T> {
        let d_out = View::contiguous(&self.d_out, dims.out());
        Cotangent { d_out, final_state: self.final_state.as_ref(), ..*cotangent }
    }

    /// Makes the gradients what they would have been.
    fn restore(
        &self,
        tensors: [(&mut ViewMut<'_, T>, [usize; 4]); 3],
        parameters: &mut [&mut [T]],
        initial_state: Option<&mut State<T>>,
    ) {
        for (view, shape) in tensors {
            for [batch, head, token] in rows(shape) {
                scale_by(view.token(batch, head, token, shape[3]), self.inverse);
            }
        }
        parameters.iter_mut().for_each(|parameter| scale_by(parameter, self.inverse));
        if let Some(state) = initial_state {
            scale_by(state.numbers_mut(), self.inverse);
        }
    }
}

fn rows([batch, heads, tokens, _]: [usize; 4]) -> impl Iterator<Item = [usize; 3]> + Clone {
    (0..batch * heads * tokens).map(move |row| [row / (heads * tokens), row / tokens % heads, row % tokens])
}
