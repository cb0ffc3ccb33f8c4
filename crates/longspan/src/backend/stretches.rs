//! A sequence in stretches, one a process: what attention exchanges of them.

use std::sync::{Arc, OnceLock};

use longspan_kernels::{CombineGradients, Error, Kernel, State};
use longspan_layers::Stretches;

use super::{AnyKernel, Peers};

/// One layer's call on a stretch.
///
/// With `S_n` the state of stretch `n` alone and `P_0` the state before the first, `P_{n+1} = P_n ⊕ S_n` by
/// [`Kernel::combine`]. The backward gathers the gradients `dP_n` that the calls of the stretches leave. In all, that of `P_n` is
/// `G_n = dP_n + ∂P_{n+1}/∂P_nᵀ G_{n+1}`, and that of `S_n` is `∂P_{n+1}/∂S_nᵀ G_{n+1}`.
#[derive(Debug)]
pub(crate) struct Stretch {
    peers: Arc<dyn Peers>,
    kernel: Arc<dyn AnyKernel>,
    /// `P_0`.
    first: State<f32>,
    /// All `S_n`, and all `P_n`.
    states: OnceLock<[Vec<State<f32>>; 2]>,
}

impl Stretch {
    /// Of a call after `first`.
    pub fn new(peers: Arc<dyn Peers>, kernel: Arc<dyn AnyKernel>, first: State<f32>) -> Self {
        Self { peers, kernel, first, states: OnceLock::new() }
    }

    fn kernel(&self) -> &dyn Kernel<f32> {
        &*self.kernel
    }

    /// A state of every rank.
    fn gather(&self, own: &State<f32>) -> Result<Vec<State<f32>>, Error> {
        let all = self.peers.gather(own.numbers()).into_iter();
        all.map(|numbers| State::from_numbers(own.shape(), numbers)).collect()
    }
}

impl Stretches for Stretch {
    fn exchange(&self, own: State<f32>, parameters: &[&[f32]]) -> Result<[State<f32>; 2], Error> {
        // A backward that forms everything again asks for it once more.
        if self.states.get().is_none() {
            // What has no backward is refused before ranks wait for each other in it.
            self.kernel().combine_backward(&self.first, &own, parameters, &own)?;
            let alone = self.gather(&own)?;
            let mut before = vec![self.first.try_clone()?];
            for (n, state) in alone.iter().enumerate() {
                before.push(self.kernel().combine(&before[n], state, parameters)?);
            }
            self.states.get_or_init(|| [alone, before]);
        }
        let Some([_, before]) = self.states.get() else { unreachable!("set above") };
        Ok([before[self.peers.rank()].try_clone()?, before[before.len() - 1].try_clone()?])
    }

    fn exchange_back(
        &self,
        d_before: State<f32>,
        parameters: &[&[f32]],
    ) -> Result<Option<CombineGradients<f32>>, Error> {
        let Some([alone, before]) = self.states.get() else { unreachable!("a backward after its forward") };
        let back = |n: usize, d: &State<f32>| self.kernel().combine_backward(&before[n], &alone[n], parameters, d);
        let d_before = self.gather(&d_before)?;
        // `G` of the stretch after `n`.
        let mut d_after: Option<State<f32>> = None;
        for n in (self.peers.rank() + 1..alone.len()).rev() {
            let direct = d_before[n].numbers().iter();
            let numbers = match &d_after {
                None => direct.copied().collect(),
                Some(d) => direct.zip(back(n, d)?.earlier.numbers()).map(|(a, b)| a + b).collect(),
            };
            d_after = Some(State::from_numbers(d_before[n].shape(), numbers)?);
        }
        d_after.map(|d| back(self.peers.rank(), &d)).transpose()
    }
}
