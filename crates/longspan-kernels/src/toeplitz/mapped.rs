//! Feature maps of whole rows: queries and keys are mapped before the call, and gradients taken back after it.
//!
//! What a map leaves to do elementwise is nothing, or an exponential of the exponents that it gives; the call itself runs
//! over these, with all its algorithms and states. It costs one more copy of queries and keys, as wide as the features.

use rayon::prelude::*;

use super::Toeplitz;
use crate::error::Error;
use crate::feature_map::FeatureMap;
use crate::feature_map::rows::{RowMap, Side};
use crate::mechanism::{Call, Cotangent, Gradients, Mechanism, Output, Token, check_token, token_dims};
use crate::real::Real;
use crate::scratch::{Scratch, padded};
use crate::shape::{Dims, View, ViewMut};
use crate::state::State;

/// Rows that are mapped at a time.
const ROWS: usize = 64;

/// A call's queries and keys as features or exponents, row-major.
pub(super) struct Mapped<'a, T: 'static> {
    map: RowMap<'a, T>,
    inner: Toeplitz,
    exponential: bool,
    dims: Dims,
    q: Vec<T>,
    k: Vec<T>,
}

impl<'a, T: Real> Mapped<'a, T> {
    /// None where the map is elementwise. The options, and the shapes of `q` and `k`, are checked.
    pub fn new(toeplitz: &Toeplitz, dims: &Dims, q: &View<'_, T>, k: &View<'_, T>) -> Option<Self> {
        let map = RowMap::new(toeplitz.feature_map, dims, &[])?;
        let exponential = toeplitz.feature_map.is_exponential();
        let feature_map = if exponential { FeatureMap::Exp } else { FeatureMap::Identity };
        let head_dim = toeplitz.feature_map.features(dims.head_dim);
        let lifted = |view: &View<'_, T>, [batch, heads, tokens, _]: [usize; 4], side: fn(usize) -> Side| {
            let width = padded::<T>(head_dim);
            let mut all = vec![T::ZERO; batch * heads * tokens * head_dim];
            let rows_of_head = (tokens * head_dim).max(1);
            all.par_chunks_exact_mut(rows_of_head).enumerate().for_each(|(index, to)| {
                let (rows, side) = (view.rows(index / heads, index % heads), side(index % heads));
                to.par_chunks_mut(ROWS * head_dim).enumerate().for_each_init(
                    || (vec![T::ZERO; ROWS * width], vec![T::ZERO; map.work_len(ROWS)]),
                    |(block, work), (chunk, to)| {
                        let count = to.len() / head_dim;
                        map.lift(side, rows.skip(chunk * ROWS), count, block, width, work);
                        for (to, from) in to.chunks_exact_mut(head_dim).zip(block.chunks_exact(width)) {
                            to.copy_from_slice(&from[..head_dim]);
                        }
                    },
                );
            });
            all
        };
        Some(Self {
            q: lifted(q, dims.q(), Side::Query),
            k: lifted(k, dims.k(), Side::Key),
            inner: Toeplitz { feature_map, ..toeplitz.clone() },
            dims: Dims { head_dim, ..*dims },
            exponential,
            map,
        })
    }

    fn call<'c>(&'c self, call: &Call<'c, T>) -> Call<'c, T> {
        let dims = self.dims;
        Call { dims, q: View::contiguous(&self.q, dims.q()), k: View::contiguous(&self.k, dims.k()), ..*call }
    }

    pub fn forward(&self, call: &Call<'_, T>, output: Output<'_, T>, scratch: &mut Scratch<T>) -> Result<(), Error> {
        self.inner.forward(&self.call(call), output, scratch)
    }

    pub fn backward(
        &self,
        call: &Call<'_, T>,
        cotangent: &Cotangent<'_, T>,
        gradients: Gradients<'_, '_, T>,
        scratch: &mut Scratch<T>,
    ) -> Result<(), Error> {
        let (mut d_q, mut d_k) = (vec![T::ZERO; self.q.len()], vec![T::ZERO; self.k.len()]);
        let Gradients { mut dq, mut dk, mut dv, parameters, initial_state } = gradients;
        let mut parameters: Vec<&mut [T]> = parameters.iter_mut().map(|gradient| &mut **gradient).collect();
        let own = Gradients {
            dq: ViewMut::contiguous(&mut d_q, self.dims.q()),
            dk: ViewMut::contiguous(&mut d_k, self.dims.k()),
            dv: dv.reborrow(),
            parameters: &mut parameters,
            initial_state,
        };
        self.inner.backward(&self.call(call), cotangent, own, scratch)?;
        self.pull_back(&call.q, call.dims.q(), Side::Query, &self.q, &d_q, &mut dq);
        self.pull_back(&call.k, call.dims.k(), Side::Key, &self.k, &d_k, &mut dk);
        Ok(())
    }

    /// Writes the gradients of raw rows from those of what they were mapped to. A row whose gradient is 0 gets 0, whatever
    /// stands in it.
    fn pull_back(
        &self,
        view: &View<'_, T>,
        [_, heads, tokens, raw_dim]: [usize; 4],
        side: fn(usize) -> Side,
        mapped: &[T],
        d: &[T],
        to: &mut ViewMut<'_, T>,
    ) {
        let (features, width, raw_width) = (self.dims.head_dim, padded::<T>(self.dims.head_dim), self.map.raw_width());
        let to = to.shared();
        let rows_of_head = (tokens * features).max(1);
        d.par_chunks_exact(rows_of_head).zip(mapped.par_chunks_exact(rows_of_head)).enumerate().for_each_init(
            || [ROWS * width, ROWS * width, ROWS * raw_width, self.map.work_len(ROWS)].map(|len| vec![T::ZERO; len]),
            |[phi, block, dx, work], (index, (d, mapped))| {
                let (batch, head) = (index / heads, index % heads);
                let rows = view.rows(batch, head);
                for first in (0..tokens).step_by(ROWS) {
                    let count = ROWS.min(tokens - first);
                    for row in 0..count {
                        let place = (first + row) * features;
                        block[row * width..][..features].copy_from_slice(&d[place..][..features]);
                        let phi = &mut phi[row * width..][..features];
                        // The gradient of an exponent is the whole of what follows.
                        match self.exponential {
                            true => phi.fill(T::ONE),
                            false => phi.copy_from_slice(&mapped[place..][..features]),
                        }
                    }
                    let (from, side) = (rows.skip(first), side(head));
                    self.map.pull_back(side, from, count, None, phi, block, width, dx, &mut [], work);
                    for row in 0..count {
                        // SAFETY: each row of a head is one task's own.
                        let to = unsafe { to.row(batch, head, first + row, raw_dim) };
                        if d[(first + row) * features..][..features].iter().all(|&d| d == T::ZERO) {
                            to.fill(T::ZERO);
                        } else {
                            to.copy_from_slice(&dx[row * raw_width..][..raw_dim]);
                        }
                    }
                }
            },
        );
    }
}

/// Takes one token into `state` and writes its output, under a map of whole rows; `None` under others.
pub(super) fn step<T: Real>(
    toeplitz: &Toeplitz,
    token: &Token<'_, T>,
    state: &mut State<T>,
    out: &mut [T],
) -> Result<Option<()>, Error> {
    if toeplitz.feature_map.is_elementwise() {
        return Ok(None);
    }
    let dims = token_dims(toeplitz, token, token.k, state)?;
    toeplitz.check_feature_map(&dims)?;
    check_token(toeplitz, &dims, token, out)?;
    let (q, k) = (View::contiguous(token.q, dims.q()), View::contiguous(token.k, dims.k()));
    let Some(mapped) = Mapped::new(toeplitz, &dims, &q, &k) else { return Ok(None) };
    mapped.inner.step(&Token { q: &mapped.q, k: &mapped.k, ..*token }, state, out).map(Some)
}
