//! One call: its sizes, its mask and the seed of its numbers; then the numbers.

use longspan_kernels::{Call, Dims, Keys, Mask, Order, Parameter, State};

use crate::random::Random;
use crate::subject::Number;

/// Which keys take part: [`Keys`] with owned numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KeyMask {
    /// All of them.
    All,
    /// The first few of each batch entry.
    Lengths(Vec<usize>),
    /// `true` means ignored.
    Padding(Vec<bool>),
    /// Several sequences end to end.
    Packed {
        /// Boundaries on the query axis.
        queries: Vec<usize>,
        /// Boundaries on the key axis.
        keys: Vec<usize>,
    },
}

/// One call without its numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Case {
    /// All sizes.
    pub dims: Dims,
    /// Whether a query sees only `j ≤ i + offset`.
    pub causal: bool,
    /// The position of query 0 on the key axis.
    pub offset: isize,
    /// Which keys take part.
    pub keys: KeyMask,
    /// Draw q, k and the parameters positive. Under feature maps that keep signs, denominators near zero would
    /// otherwise make every tolerance meaningless.
    pub positive: bool,
    /// Seed of the numbers.
    pub seed: u64,
}

impl Case {
    /// A call over all keys.
    pub fn new(dims: Dims, causal: bool) -> Self {
        Self { dims, causal, offset: 0, keys: KeyMask::All, positive: false, seed: 1 }
    }

    /// The mask that kernels take.
    pub fn mask(&self) -> Mask<'_> {
        let keys = match &self.keys {
            KeyMask::All => Keys::All,
            KeyMask::Lengths(lengths) => Keys::Lengths(lengths),
            KeyMask::Padding(ignored) => Keys::Padding(ignored),
            KeyMask::Packed { queries, keys } => Keys::Packed { queries, keys },
        };
        let order = if self.causal { Order::Causal } else { Order::Bidirectional };
        Mask { order, offset: self.offset, keys }
    }

    /// Whether key `j` is ignored whatever the query.
    pub fn ignores(&self, batch: usize, j: usize) -> bool {
        match &self.keys {
            KeyMask::All | KeyMask::Packed { .. } => false,
            KeyMask::Lengths(lengths) => j >= lengths[batch],
            KeyMask::Padding(ignored) => ignored[batch * self.dims.keys + j],
        }
    }

    /// Whether query `i` sees key `j`; written without the kernels' own code.
    pub fn sees(&self, batch: usize, i: usize, j: usize) -> bool {
        if self.ignores(batch, j) {
            return false;
        }
        let (mut query, mut key) = (i as isize, j as isize);
        if let KeyMask::Packed { queries, keys } = &self.keys {
            let sequence = |bounds: &[usize], n: usize| bounds.iter().filter(|&&bound| bound <= n).count() - 1;
            let own = sequence(queries, i);
            if own != sequence(keys, j) {
                return false;
            }
            query -= queries[own] as isize;
            key -= keys[own] as isize;
        }
        !self.causal || key <= query + self.offset
    }

    /// Whether any query of the batch entry sees key `j`.
    pub fn is_seen(&self, batch: usize, j: usize) -> bool {
        (0..self.dims.queries).any(|i| self.sees(batch, i, j))
    }

    /// Terms in the longest sum of a call, with which the rounding error grows.
    pub fn terms(&self) -> usize {
        self.dims.queries.max(self.dims.keys) * self.dims.group().max(1)
            + self.dims.head_dim
            + self.dims.value_dim
            + self.dims.batch
    }
}

/// The numbers of a call and the gradient of its output; row-major.
#[derive(Debug, Clone, PartialEq)]
pub struct Inputs<T> {
    /// `[batch, heads, queries, head_dim]`.
    pub q: Vec<T>,
    /// `[batch, kv_heads, keys, head_dim]`, or narrower if the mechanism's keys are.
    pub k: Vec<T>,
    /// `[batch, kv_heads, keys, value_dim]`.
    pub v: Vec<T>,
    /// As the mechanism lists them.
    pub parameters: Vec<Vec<T>>,
    /// How many numbers of each parameter a key brings with it, `[batch, kv_heads, keys, n]`; 0 for learned tensors.
    pub per_key: Vec<usize>,
    /// The gradient of the output, as the output.
    pub d_out: Vec<T>,
}

/// How many numbers of a parameter a key brings with it.
pub fn per_key(parameter: &Parameter) -> usize {
    match (parameter.name, &*parameter.shape) {
        ("log_decay" | "beta", [_, _, _]) => 1,
        ("log_decay", [_, _, _, width]) => *width,
        _ => 0,
    }
}

impl Inputs<f64> {
    /// Normally distributed numbers. q, k, v and `d_out` depend on the case alone, not on the mechanism.
    pub fn random(case: &Case, key_dim: usize, parameters: &[Parameter]) -> Self {
        let mut random = Random::new(case.seed);
        let len = |shape: [usize; 4]| shape.iter().product::<usize>();
        let mut draw = |len: usize, positive: bool| -> Vec<f64> {
            (0..len).map(|_| if positive { random.normal().abs() } else { random.normal() }).collect()
        };
        Self {
            q: draw(len(case.dims.q()), case.positive),
            k: draw(len([key_dim, case.dims.batch, case.dims.kv_heads, case.dims.keys]), case.positive),
            v: draw(len(case.dims.v()), false),
            d_out: draw(len(case.dims.out()), false),
            parameters: parameters.iter().map(|p| draw(p.len(), case.positive)).collect(),
            per_key: parameters.iter().map(per_key).collect(),
        }
    }

    /// With tensor `which` of q, k, v and the parameters moved by `step` along a direction; as it is where there is none.
    pub(crate) fn moved(&self, which: usize, step: f64, direction: &[f64]) -> Self {
        let mut moved = self.clone();
        let tensors = [&mut moved.q, &mut moved.k, &mut moved.v].into_iter().chain(&mut moved.parameters);
        for x in tensors.skip(which).take(1) {
            x.iter_mut().zip(direction).for_each(|(x, e)| *x += step * e);
        }
        moved
    }

    /// Adds to every number of a key what `level` says of its token, and rounds it to `f32`.
    pub fn raise_keys(&mut self, dims: &Dims, level: impl Fn(usize) -> f64) {
        let width = self.key_shape(dims)[3];
        for (n, k) in self.k.iter_mut().enumerate() {
            *k = f64::from((*k + level(n / width % dims.keys)) as f32);
        }
    }
}

impl<T: Number> Inputs<T> {
    /// In another number type.
    pub fn cast<U: Number>(&self) -> Inputs<U> {
        let cast = |x: &Vec<T>| x.iter().map(|x| U::from_f64(x.to_f64())).collect();
        Inputs {
            q: cast(&self.q),
            k: cast(&self.k),
            v: cast(&self.v),
            d_out: cast(&self.d_out),
            parameters: self.parameters.iter().map(cast).collect(),
            per_key: self.per_key.clone(),
        }
    }

    /// Hands the call to `body`.
    pub fn call<R>(&self, case: &Case, initial_state: Option<&State<T>>, body: impl FnOnce(&Call<'_, T>) -> R) -> R {
        let parameters: Vec<&[T]> = self.parameters.iter().map(Vec::as_slice).collect();
        let call = Call::row_major(case.dims, [&self.q, &self.k, &self.v]).with_parameters(&parameters);
        body(&call.with_mask(case.mask()).with_initial_state(initial_state))
    }

    /// Shape of `k`: its last axis is narrower than [`Dims::head_dim`] where the mechanism's keys are.
    pub fn key_shape(&self, dims: &Dims) -> [usize; 4] {
        let [batch, heads, keys, head_dim] = dims.k();
        [batch, heads, keys, self.k.len().checked_div(batch * heads * keys).unwrap_or(head_dim)]
    }

    /// Overwrites key and value `j` of one batch entry, all heads.
    pub fn overwrite_key(&mut self, dims: &Dims, batch: usize, j: usize, key: T, value: T) {
        let key_dim = self.key_shape(dims)[3];
        for head in 0..dims.kv_heads {
            let token = (batch * dims.kv_heads + head) * dims.keys + j;
            self.k[token * key_dim..][..key_dim].fill(key);
            self.v[token * dims.value_dim..][..dims.value_dim].fill(value);
        }
    }
}
