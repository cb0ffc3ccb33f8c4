//! The arrays and the mask of a call, and how the kernels run on them.

use std::ops::Range;

use longspan_kernels::{self as kernels, Call, Dims, Keys, Mask, Order, Plan, Scratch};
use pyo3::prelude::*;

use crate::arrays::{Precision, Tensor};
use crate::call::Mechanism;
use crate::precise::Precise;
use crate::signals;

/// A batch entry, and its queries and keys that belong together.
type Sequence = (usize, Range<usize>, Range<usize>);

/// Boundaries of packed sequences on the query and the key axis.
pub type Boundaries = (Vec<usize>, Vec<usize>);

/// A mask that owns its lists.
pub struct OwnedMask {
    pub order: Order,
    pub offset: isize,
    pub ignored: Option<Vec<bool>>,
    pub packed: Option<Boundaries>,
}

impl OwnedMask {
    fn as_kernel(&self) -> Mask<'_> {
        let keys = match (&self.ignored, &self.packed) {
            (Some(ignored), _) => Keys::Padding(ignored),
            (None, Some((queries, keys))) => Keys::Packed { queries, keys },
            (None, None) => Keys::All,
        };
        Mask { order: self.order, offset: self.offset, keys }
    }
}

/// The arrays of a call after all checks of shape and type.
pub struct Inputs<'py> {
    pub dims: Dims,
    /// Heads of values that share one of queries and keys.
    pub sharing: usize,
    pub q: Tensor<'py>,
    pub k: Tensor<'py>,
    pub v: Tensor<'py>,
    pub parameters: Vec<Tensor<'py>>,
    /// Which parameter are the queries' positions, before those of the keys, where they are given.
    pub positions: Option<usize>,
    pub mask: OwnedMask,
}

impl OwnedMask {
    /// The sequences of a call; `None` where boundaries fit none.
    fn sequences(&self, dims: &Dims) -> Option<Vec<Sequence>> {
        let Some((queries, keys)) = &self.packed else {
            return Some((0..dims.batch).map(|entry| (entry, 0..dims.queries, 0..dims.keys)).collect());
        };
        let ranges = |bounds: &[usize], tokens| -> Option<Vec<Range<usize>>> {
            let fits = bounds.is_sorted() && bounds.last().is_none_or(|&last| last <= tokens);
            fits.then(|| bounds.windows(2).map(|pair| pair[0]..pair[1]).collect())
        };
        let (queries, keys) = (ranges(queries, dims.queries)?, ranges(keys, dims.keys)?);
        Some(queries.into_iter().zip(keys).map(|(queries, keys)| (0, queries, keys)).collect())
    }
}

impl Inputs<'_> {
    /// Counts each sequence's given positions of single precision from its one nearest to zero. Only differences matter to outputs, but the
    /// gradient of a frequency is a sum of products with positions and loses the digits that all of them share. Not for states:
    /// those hold keys turned by the positions that were given.
    pub fn bring_positions_near(&mut self) -> PyResult<()> {
        let Some(at) = self.positions.filter(|_| self.q.dtype().precision() == Precision::F32) else { return Ok(()) };
        let dims = self.dims;
        let axes = self.parameters[at].shape()[2];
        let Some(sequences) = self.mask.sequences(&dims) else { return Ok(()) };
        let place = |entry: usize, tokens: usize, token: usize, axis: usize| (entry * tokens + token) * axes + axis;
        for (entry, queries, keys) in sequences.into_iter().filter(|_| dims.batch == 1 || self.mask.packed.is_none()) {
            for axis in 0..axes {
                let of_queries = queries.clone().map(|token| (at, place(entry, dims.queries, token, axis)));
                let of_keys = keys.clone().map(|token| (at + 1, place(entry, dims.keys, token, axis)));
                let there = |token: &usize| {
                    self.mask.ignored.as_ref().is_none_or(|ignored| !ignored[entry * dims.keys + token])
                };
                let seen_keys = keys.clone().filter(there).map(|token| (at + 1, place(entry, dims.keys, token, axis)));
                let seen =
                    of_queries.clone().chain(seen_keys).map(|(which, n)| self.parameters[which].numbers::<f32>()[n]);
                let (least, greatest) = seen
                    .filter(|position| position.is_finite())
                    .fold((f32::INFINITY, f32::NEG_INFINITY), |(a, b), x| (a.min(x), b.max(x)));
                let origin = if least > greatest { 0.0 } else { least.max(0.0) + greatest.min(0.0) };
                if origin == 0.0 {
                    continue;
                }
                for (which, n) in of_queries.chain(of_keys) {
                    self.parameters[which].singles_mut()?[n] -= origin;
                }
            }
        }
        Ok(())
    }

    /// Runs `work` on the kernels' view of this call, without Python's lock, with working memory that this thread keeps, and on as
    /// many threads as `seconds` of one thread are worth. Ctrl-C ends it.
    pub fn run<T: Precise, R: Send>(
        &self,
        py: Python<'_>,
        mechanism: &Mechanism,
        initial_state: Option<&kernels::State<T>>,
        seconds: impl FnOnce(&Plan) -> Option<f64> + Send,
        work: impl FnOnce(&dyn kernels::Kernel<T>, &Call<'_, T>, &mut Scratch<T>) -> Result<R, kernels::Error> + Send,
    ) -> PyResult<R> {
        let parameters: Vec<&[T]> = self.parameters.iter().map(Tensor::numbers).collect();
        let [q, k] = [&self.q, &self.k].map(|shared| shared.view().with_shared_heads(self.sharing));
        let call = Call::new(self.dims, q, k, self.v.view())
            .with_parameters(&parameters)
            .with_mask(self.mask.as_kernel())
            .with_initial_state(initial_state);
        let kernel = mechanism.kernel();
        py.detach(|| {
            let kernel = T::kernel(kernel);
            // A call that makes no sense is refused by the work itself.
            let plan = kernel.plan(&call.dims, &call.mask).ok();
            let seconds = plan.as_ref().and_then(seconds).unwrap_or(f64::INFINITY);
            let mut scratch = T::scratch().take().unwrap_or_default();
            let result = signals::run(seconds, || work(kernel, &call, &mut scratch));
            T::scratch().set(Some(scratch));
            result?.map_err(|e| mechanism.failed(e))
        })
    }
}
