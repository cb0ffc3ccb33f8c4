//! The numbers of a call that is checked, and what mechanisms make of them.

use longspan_kernels::{
    Call, Cotangent, Dims, Error as KernelError, Gradients, Kernel, Mask, Output, Real, Scratch, Token, View, ViewMut,
};

use crate::random::Random;
use crate::workload::len;

/// The numbers of one call; parameters last.
#[derive(Clone)]
pub(crate) struct Inputs<T> {
    pub dims: Dims,
    key_dim: usize,
    mask: Mask<'static>,
    /// Of `tensors`.
    pub names: Vec<&'static str>,
    /// q, k, v, then the parameters.
    pub tensors: Vec<Vec<T>>,
    pub d_out: Vec<T>,
}

impl Inputs<f64> {
    /// Numbers that f32 holds exactly; the seed is the number of queries.
    pub fn random(mechanism: &dyn Kernel<f64>, dims: Dims, mask: Mask<'static>) -> Self {
        let mut random = Random::new(dims.queries as u64);
        let key_dim = mechanism.key_dim(&dims);
        let mut draw = |len: usize, scale: f64| (0..len).map(|_| scale * random.normal()).collect::<Vec<f64>>();
        let mut tensors = vec![draw(len(dims.q()), 1.0), draw(dims.batch * dims.kv_heads * dims.keys * key_dim, 1.0)];
        tensors.push(draw(len(dims.v()), 1.0));
        // Parameters enter exponents in some mechanisms; at half the size no weight drowns all others. Halves are exact.
        let parameters = mechanism.parameters(&dims);
        tensors.extend(parameters.iter().map(|parameter| draw(parameter.len(), 0.5)));
        let names = ["q", "k", "v"].into_iter().chain(parameters.iter().map(|parameter| parameter.name)).collect();
        let d_out = draw(len(dims.out()), 1.0);
        Self { dims, key_dim, mask, names, tensors, d_out }
    }

    /// The call of the last `rows` queries over all keys.
    pub fn last_queries(&self, rows: usize) -> Self {
        let skipped = self.dims.queries - rows;
        let last = |x: &[f64], width: usize| -> Vec<f64> {
            let head = self.dims.queries * width;
            x.chunks_exact(head).flat_map(|head| &head[skipped * width..]).copied().collect()
        };
        let mut tensors = self.tensors.clone();
        tensors[0] = last(&self.tensors[0], self.dims.head_dim);
        Self {
            dims: Dims { queries: rows, ..self.dims },
            mask: self.mask.with_offset(self.mask.offset + skipped as isize),
            tensors,
            d_out: last(&self.d_out, self.dims.value_dim),
            ..self.clone()
        }
    }

    /// The same in f32.
    pub fn to_f32(&self) -> Inputs<f32> {
        let single = |x: &Vec<f64>| x.iter().map(|&x| x as f32).collect();
        Inputs {
            dims: self.dims,
            key_dim: self.key_dim,
            mask: self.mask,
            names: self.names.clone(),
            tensors: self.tensors.iter().map(single).collect(),
            d_out: single(&self.d_out),
        }
    }
}

impl<T: Real> Inputs<T> {
    /// Hands the call of these numbers to `body`.
    pub fn call<R>(&self, body: impl FnOnce(&Call<'_, T>) -> R) -> R {
        let parameters: Vec<&[T]> = self.tensors[3..].iter().map(Vec::as_slice).collect();
        let [batch, heads, keys, _] = self.dims.k();
        body(
            &Call::new(
                self.dims,
                View::contiguous(&self.tensors[0], self.dims.q()),
                View::contiguous(&self.tensors[1], [batch, heads, keys, self.key_dim]),
                View::contiguous(&self.tensors[2], self.dims.v()),
            )
            .with_parameters(&parameters)
            .with_mask(self.mask),
        )
    }

    /// Output and gradients, from memory that starts as NaN.
    pub fn run(&self, mechanism: &dyn Kernel<T>) -> Result<(Vec<T>, Vec<Vec<T>>), KernelError> {
        self.run_with(mechanism, |out| out)
    }

    /// The same with the backward told of another output.
    pub fn run_with(&self, mechanism: &dyn Kernel<T>, told: fn(T) -> T) -> Result<(Vec<T>, Vec<Vec<T>>), KernelError> {
        let nan = T::from_f64(f64::NAN);
        let dims = &self.dims;
        let mut out = vec![nan; len(dims.out())];
        let mut denominators = vec![nan; len(mechanism.denominators(dims))];
        let mut scratch = Scratch::new();
        self.call(|call| {
            let output = Output::training(ViewMut::contiguous(&mut out, dims.out()), &mut denominators);
            mechanism.forward(call, output, &mut scratch)
        })?;
        out.iter_mut().for_each(|x| *x = told(*x));
        let mut gradients: Vec<Vec<T>> = self.tensors.iter().map(|x| vec![nan; x.len()]).collect();
        let [dq, dk, dv, parameters @ ..] = gradients.as_mut_slice() else { return Ok((out, gradients)) };
        let mut parameters: Vec<&mut [T]> = parameters.iter_mut().map(Vec::as_mut_slice).collect();
        let [batch, heads, keys, _] = dims.k();
        self.call(|call| {
            let cotangent = Cotangent {
                out: View::contiguous(&out, dims.out()),
                denominators: &denominators,
                d_out: View::contiguous(&self.d_out, dims.out()),
                final_state: None,
            };
            let gradients = Gradients {
                dq: ViewMut::contiguous(dq, dims.q()),
                dk: ViewMut::contiguous(dk, [batch, heads, keys, self.key_dim]),
                dv: ViewMut::contiguous(dv, dims.v()),
                parameters: &mut parameters,
                initial_state: None,
            };
            mechanism.backward(call, &cotangent, gradients, &mut scratch)
        })?;
        Ok((out, gradients))
    }

    /// The output token by token.
    pub fn steps(&self, mechanism: &dyn Kernel<T>) -> Result<Vec<T>, KernelError> {
        let dims = &self.dims;
        let parameters: Vec<&[T]> = self.tensors[3..].iter().map(Vec::as_slice).collect();
        let mut state = mechanism.empty_state(dims)?;
        let mut out = vec![T::ZERO; len(dims.out())];
        let mut row = vec![T::ZERO; dims.batch * dims.heads * dims.value_dim];
        let gather = |x: &[T], heads: usize, width: usize, token: usize| -> Vec<T> {
            let start = |head: usize| (head * dims.queries + token) * width;
            (0..dims.batch * heads).flat_map(|head| x[start(head)..][..width].to_vec()).collect()
        };
        for token in 0..dims.queries {
            let q = gather(&self.tensors[0], dims.heads, dims.head_dim, token);
            let k = gather(&self.tensors[1], dims.kv_heads, self.key_dim, token);
            let v = gather(&self.tensors[2], dims.kv_heads, dims.value_dim, token);
            row.fill(T::from_f64(f64::NAN));
            mechanism.step(&Token { q: &q, k: &k, v: &v, parameters: &parameters }, &mut state, &mut row)?;
            for (head, row) in row.chunks_exact(dims.value_dim).enumerate() {
                out[(head * dims.queries + token) * dims.value_dim..][..dims.value_dim].copy_from_slice(row);
            }
        }
        Ok(out)
    }
}
