//! The state of a short convolution: its latest products, and how many tokens there were.

use super::{ShortConvolution, check_options};
use crate::call::{CombineGradients, Dims, Mechanism, State, StateShape, Stateful, check_state, fingerprint, is_count};
use crate::error::{Error, expect};
use crate::simd::Real;

/// How many tokens a state that was checked has seen, up to those that it holds.
pub(super) fn tokens<T: Real>(state: &State<T>, batch: usize, kv_head: usize) -> usize {
    state.head(batch, kv_head)[2][0].to_f64() as usize
}

/// Checks two states that follow each other, and gives the numbers of a product and of products.
fn check_both<T: Real>(
    convolution: &ShortConvolution,
    earlier: &State<T>,
    later: &State<T>,
) -> Result<[usize; 2], Error> {
    let shape = earlier.shape();
    later.check(convolution.name(), "later state", shape)?;
    let before = convolution.width.saturating_sub(1);
    // The width of a head follows from a state only where it holds products.
    let width = shape.parts[0].checked_div(before).unwrap_or(0);
    let dims = shape.dims(if convolution.gated { width } else { 0 }, width);
    check_state(convolution, &dims, earlier, "earlier state")?;
    check_state(convolution, &dims, later, "later state")?;
    Ok([width, before])
}

impl Stateful for ShortConvolution {
    fn state_shape<T: Real>(&self, dims: &Dims) -> Result<StateShape, Error> {
        check_options(self, dims)?;
        let products = self.before().saturating_mul(dims.value_dim);
        let parts = [products, 0, 1, 0, 0, 0];
        Ok(StateShape::new(self.name(), fingerprint([self.width as u64]), dims, parts))
    }

    fn check_marks<T: Real>(&self, state: &State<T>, argument: &'static str) -> Result<(), Error> {
        let most = self.before();
        let wrong = state.each(2).map(|tokens| tokens[0]).find(|&n| !is_count(n, most + 1));
        let expected = || format!("a whole number up to {most} as the number of tokens");
        expect(wrong.is_none(), self.name(), argument, expected, || wrong.unwrap_or(T::ZERO).to_string())
    }

    fn combine<T: Real>(&self, earlier: &State<T>, later: &State<T>, _: &[&[T]]) -> Result<State<T>, Error> {
        let [width, before] = check_both(self, earlier, later)?;
        let mut both = later.try_clone()?;
        for ([products, _, held, ..], [older, _, earlier, ..]) in both.heads_mut().zip(earlier.heads()) {
            let tokens = held[0].to_f64() as usize;
            let kept = (before - tokens) * width;
            products[..kept].copy_from_slice(&older[tokens * width..]);
            held[0] = T::from_f64((tokens as f64 + earlier[0].to_f64()).min(before as f64));
        }
        Ok(both)
    }

    fn combine_backward<T: Real>(
        &self,
        earlier: &State<T>,
        later: &State<T>,
        parameters: &[&[T]],
        d_combined: &State<T>,
    ) -> Result<CombineGradients<T>, Error> {
        let [width, before] = check_both(self, earlier, later)?;
        d_combined.check(self.name(), "gradient of the sum", earlier.shape())?;
        let (mut d_earlier, mut d_later) = (State::zeros(earlier.shape())?, State::zeros(earlier.shape())?);
        let heads = d_earlier.heads_mut().zip(d_later.heads_mut()).zip(later.heads().zip(d_combined.heads()));
        for (([to_earlier, ..], [to_later, ..]), ([_, _, held, ..], [d, ..])) in heads {
            let tokens = held[0].to_f64() as usize;
            let kept = (before - tokens) * width;
            to_earlier[tokens * width..].copy_from_slice(&d[..kept]);
            to_later[kept..].copy_from_slice(&d[kept..]);
        }
        let parameters = parameters.iter().map(|numbers| vec![T::ZERO; numbers.len()]).collect();
        Ok(CombineGradients { earlier: d_earlier, later: d_later, parameters })
    }
}
