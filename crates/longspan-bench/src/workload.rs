//! Calls with their memory: one set of buffers for all mechanisms of one size, so that all get the same numbers.

use std::fmt;
use std::sync::Arc;

use longspan_kernels::{
    Call, Cotangent, Dims, Error as KernelError, Gradients, Kernel, Mask, Order, Output, Parameter, Purpose, Scratch,
    State, Token, View, ViewMut,
};
use serde::{Deserialize, Serialize};

use crate::memory;
use crate::random::Random;

/// What of a mechanism is timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Pass {
    /// The output.
    Forward,
    /// The output, then the gradients of every input.
    ForwardBackward,
    /// One token through [`Kernel::step`], after a prefix of so many tokens.
    Decode,
}

impl Pass {
    /// Every pass.
    pub const ALL: [Self; 3] = [Self::Forward, Self::ForwardBackward, Self::Decode];

    /// The name in tables and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::ForwardBackward => "forward-backward",
            Self::Decode => "decode",
        }
    }

    /// What its calls are made for.
    pub(crate) fn purpose(self) -> Purpose {
        match self {
            Self::Forward | Self::Decode => Purpose::Inference,
            Self::ForwardBackward => Purpose::Training,
        }
    }
}

impl fmt::Display for Pass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

pub(crate) fn len(shape: [usize; 4]) -> usize {
    shape.iter().product()
}

/// Inputs, outputs and gradients of calls of one size; what a pass does not need stays empty.
pub(crate) struct Buffers {
    pub dims: Dims,
    pass: Pass,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    d_out: Vec<f32>,
    out: Vec<f32>,
    dq: Vec<f32>,
    dk: Vec<f32>,
    dv: Vec<f32>,
}

impl Buffers {
    pub fn new(dims: Dims, pass: Pass) -> Self {
        let mut random = Random::new(1);
        let backward = pass == Pass::ForwardBackward;
        let mut buffers = Self {
            dims,
            pass,
            q: random.normals(len(dims.q()), 1.0),
            k: random.normals(dims.batch * dims.kv_heads * dims.keys * widest_key(&dims), 1.0),
            v: random.normals(len(dims.v()), 1.0),
            d_out: random.normals(if backward { len(dims.out()) } else { 0 }, 1.0),
            out: Vec::new(),
            dq: Vec::new(),
            dk: Vec::new(),
            dv: Vec::new(),
        };
        buffers.renew();
        // Pages that nothing has written to would make the first call slower than the later ones.
        for output in [&mut buffers.out, &mut buffers.dq, &mut buffers.dk, &mut buffers.dv] {
            output.fill(1.0);
        }
        buffers
    }

    /// Fresh outputs and gradients, as a caller has who keeps none.
    pub fn renew(&mut self) {
        self.out = vec![0.0; len(self.dims.out())];
        if self.pass == Pass::ForwardBackward {
            self.dq = vec![0.0; self.q.len()];
            self.dk = vec![0.0; self.k.len()];
            self.dv = vec![0.0; self.v.len()];
        }
    }

    /// Bytes of inputs and outputs of a call, without parameters.
    pub fn bytes(dims: &Dims, pass: Pass) -> usize {
        let inputs = len(dims.q()) + len(dims.k()) + len(dims.v());
        let numbers = match pass {
            Pass::Forward | Pass::Decode => inputs + len(dims.out()),
            Pass::ForwardBackward => 2 * (inputs + len(dims.out())) + dims.batch * dims.heads * dims.queries,
        };
        numbers * size_of::<f32>()
    }
}

/// Bytes of a mechanism's parameters, and of their gradients where the pass wants them.
pub(crate) fn parameter_bytes(mechanism: &dyn Kernel<f32>, dims: &Dims, pass: Pass) -> usize {
    let numbers = mechanism.parameters(dims).iter().map(Parameter::len).fold(0usize, usize::saturating_add);
    numbers.saturating_mul(if pass == Pass::ForwardBackward { 2 } else { 1 }).saturating_mul(size_of::<f32>())
}

/// A mechanism with what belongs to it alone: parameters, their gradients, denominators, scratch.
pub(crate) struct Subject {
    mechanism: Arc<dyn Kernel<f32>>,
    parameters: Vec<Vec<f32>>,
    d_parameters: Vec<Vec<f32>>,
    denominators: Vec<f32>,
    scratch: Scratch<f32>,
}

impl Subject {
    pub fn new(mechanism: Arc<dyn Kernel<f32>>, dims: &Dims, pass: Pass) -> Self {
        let mut random = Random::new(2);
        let shapes = mechanism.parameters(dims);
        let (d_parameters, denominators) = if pass == Pass::ForwardBackward {
            let d_parameters = shapes.iter().map(|parameter| vec![0.0; parameter.len()]).collect();
            (d_parameters, vec![0.0; len(mechanism.denominators(dims))])
        } else {
            (Vec::new(), Vec::new())
        };
        Self {
            mechanism,
            // Small, as parameters are after training has begun; in exponents large ones would leave weight to a few keys only.
            parameters: shapes.iter().map(|parameter| random.normals(parameter.len(), 0.1)).collect(),
            d_parameters,
            denominators,
            scratch: Scratch::new(),
        }
    }

    /// Fresh denominators, as [`Buffers::renew`] makes fresh outputs.
    pub fn renew(&mut self) {
        self.denominators = vec![0.0; self.denominators.len()];
    }

    /// One call of the buffers' pass, which is not [`Pass::Decode`].
    pub fn run(&mut self, buffers: &mut Buffers, order: Order) -> Result<(), KernelError> {
        let unclocked = |body: &mut dyn FnMut()| {
            body();
            0.0
        };
        self.timed(buffers, order, &unclocked).map(drop)
    }

    /// The same with seconds by a clock, of the forward call and of the backward one, if the pass has it.
    pub fn timed(
        &mut self,
        buffers: &mut Buffers,
        order: Order,
        clock: &dyn Fn(&mut dyn FnMut()) -> f64,
    ) -> Result<[Option<f64>; 2], KernelError> {
        let Buffers { dims, pass, q, k, v, d_out, out, dq, dk, dv } = buffers;
        let parameters: Vec<&[f32]> = self.parameters.iter().map(Vec::as_slice).collect();
        let k_shape = key_shape(&*self.mechanism, dims);
        let k_len = len(k_shape);
        let call = Call::new(
            *dims,
            View::contiguous(q, dims.q()),
            View::contiguous(&k[..k_len], k_shape),
            View::contiguous(v, dims.v()),
        )
        .with_parameters(&parameters)
        .with_mask(Mask { order, ..Mask::default() });
        let backward = *pass == Pass::ForwardBackward;
        let to = ViewMut::contiguous(out, dims.out());
        let output = if backward { Output::training(to, &mut self.denominators) } else { Output::new(to) };
        let (mechanism, scratch) = (&*self.mechanism, &mut self.scratch);
        let forward = once(clock, || mechanism.forward(&call, output, scratch))?;
        if !backward {
            return Ok([Some(forward), None]);
        }
        let cotangent = Cotangent {
            out: View::contiguous(out, dims.out()),
            denominators: &self.denominators,
            d_out: View::contiguous(d_out, dims.out()),
            final_state: None,
        };
        let mut d_parameters: Vec<&mut [f32]> = self.d_parameters.iter_mut().map(Vec::as_mut_slice).collect();
        let gradients = Gradients {
            dq: ViewMut::contiguous(dq, dims.q()),
            dk: ViewMut::contiguous(&mut dk[..k_len], k_shape),
            dv: ViewMut::contiguous(dv, dims.v()),
            parameters: &mut d_parameters,
            initial_state: None,
        };
        let scratch = &mut self.scratch;
        let backward = once(clock, || mechanism.backward(&call, &cotangent, gradients, scratch))?;
        Ok([Some(forward), Some(backward)])
    }

    /// Bytes at the peak of a call whose scratch starts empty, beyond inputs and outputs; what scratch grew to where the
    /// program's allocator does not count.
    pub fn extra_bytes(&mut self, buffers: &mut Buffers, order: Order) -> Result<usize, KernelError> {
        self.scratch = Scratch::new();
        let (result, peak) = memory::peak(|| self.run(buffers, order));
        result?;
        Ok(peak.unwrap_or(self.scratch.bytes()))
    }

    /// The state after all tokens of the buffers, from a call without queries: outputs take a quadratic mechanism minutes where
    /// its state takes none.
    pub fn prefix(&mut self, buffers: &mut Buffers) -> Result<State<f32>, KernelError> {
        let dims = Dims { queries: 0, ..buffers.dims };
        let mut state = self.mechanism.empty_state(&dims)?;
        let parameters: Vec<&[f32]> = self.parameters.iter().map(Vec::as_slice).collect();
        let k_shape = key_shape(&*self.mechanism, &dims);
        let call = Call::new(
            dims,
            View::contiguous(&[], dims.q()),
            View::contiguous(&buffers.k[..len(k_shape)], k_shape),
            View::contiguous(&buffers.v, dims.v()),
        )
        .with_parameters(&parameters)
        .with_mask(Mask::causal());
        let output = Output::new(ViewMut::contiguous(&mut [], dims.out())).with_final_state(Some(&mut state));
        self.mechanism.forward(&call, output, &mut self.scratch)?;
        Ok(state)
    }

    /// Takes `tokens` tokens one by one.
    pub fn steps(&mut self, token: &mut OneToken, state: &mut State<f32>, tokens: usize) -> Result<(), KernelError> {
        let parameters: Vec<&[f32]> = self.parameters.iter().map(Vec::as_slice).collect();
        let k = &token.k[..token.k_heads * token.key_dim(&*self.mechanism)];
        for _ in 0..tokens {
            let input = Token { q: &token.q, k, v: &token.v, parameters: &parameters };
            self.mechanism.step(&input, state, &mut token.out)?;
        }
        Ok(())
    }
}

/// Seconds of one call.
fn once(
    clock: &dyn Fn(&mut dyn FnMut()) -> f64,
    call: impl FnOnce() -> Result<(), KernelError>,
) -> Result<f64, KernelError> {
    let (mut call, mut result) = (Some(call), Ok(()));
    let seconds = clock(&mut || {
        if let Some(call) = call.take() {
            result = call();
        }
    });
    result.map(|()| seconds)
}

/// The most numbers in a key of any mechanism: beside its own a gate for each channel, and one.
fn widest_key(dims: &Dims) -> usize {
    2 * dims.head_dim + 1
}

fn key_shape(mechanism: &dyn Kernel<f32>, dims: &Dims) -> [usize; 4] {
    let [batch, heads, keys, _] = dims.k();
    [batch, heads, keys, mechanism.key_dim(dims)]
}

/// One token and the place for its output.
pub(crate) struct OneToken {
    dims: Dims,
    k_heads: usize,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    out: Vec<f32>,
}

impl OneToken {
    pub fn new(dims: Dims) -> Self {
        let mut random = Random::new(3);
        let heads = dims.batch * dims.heads;
        let k_heads = dims.batch * dims.kv_heads;
        Self {
            dims,
            k_heads,
            q: random.normals(heads * dims.head_dim, 1.0),
            k: random.normals(k_heads * widest_key(&dims), 1.0),
            v: random.normals(k_heads * dims.value_dim, 1.0),
            out: vec![0.0; heads * dims.value_dim],
        }
    }

    fn key_dim(&self, mechanism: &dyn Kernel<f32>) -> usize {
        mechanism.key_dim(&self.dims)
    }
}
