//! The arrays and the mask of a call, and how the kernels run on them.

use longspan_kernels::{self as kernels, Call, Dims, Keys, Mask, Order, Plan, Scratch};
use pyo3::prelude::*;

use crate::arrays::Tensor;
use crate::call::Mechanism;
use crate::precise::Precise;
use crate::signals;

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
    pub q: Tensor<'py>,
    pub k: Tensor<'py>,
    pub v: Tensor<'py>,
    pub parameters: Vec<Tensor<'py>>,
    pub mask: OwnedMask,
}

impl Inputs<'_> {
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
        let call = Call::new(self.dims, self.q.view(), self.k.view(), self.v.view())
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
