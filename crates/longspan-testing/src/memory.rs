//! Layouts and working memory: poisoned buffers, strides, gaps.

use longspan_kernels::{Call, Cotangent, Gradients, Output, Purpose, Scratch, View, ViewMut};

use crate::case::Case;
use crate::compare::{Failure, ensure, same_bits, same_gradients};
use crate::execute::{self, Backward, Forward};
use crate::subject::{Number, Subject};

/// The same bits on clean memory and where everything to be written, and all scratch, holds NaN.
pub fn poison_does_not_matter<T: Number>(subject: &Subject, case: &Case) -> Result<(), Failure> {
    let inputs = execute::random(subject, case).cast::<T>();
    let forward =
        |fill: T, scratch: &mut Scratch<T>| execute::forward_into(subject, case, &inputs, (None, None), fill, scratch);
    let mut scratch = Scratch::new();
    let clean = forward(T::ZERO, &mut scratch)?;
    let dirty = forward(execute::nan(), &mut execute::poisoned(&scratch))?;
    let backward =
        |fill: T, scratch: &mut Scratch<T>| execute::backward_into(subject, case, &inputs, &clean, fill, scratch);
    let mut scratch = Scratch::new();
    let clean_back = backward(T::ZERO, &mut scratch)?;
    let dirty_back = backward(execute::nan(), &mut execute::poisoned(&scratch))?;
    same_bits("out on poisoned memory", &dirty.out, &clean.out)?;
    same_bits("denominators on poisoned memory", &dirty.denominators, &clean.denominators)?;
    same_gradients("on poisoned memory", &dirty_back, &clean_back)?;
    // A call need not ask for denominators, and scratch of another call can be reused.
    let out = execute::output_alone(subject, case, &inputs, &mut Scratch::filled(17, execute::nan()))?;
    let plan = T::mechanism(subject).plan(&case.dims, &case.mask())?;
    let one_algorithm = plan.algorithm(Purpose::Inference) == plan.algorithm(Purpose::Training);
    // Where inference and training run different algorithms, other tests check either.
    if one_algorithm {
        return same_bits("out without denominators", &out, &clean.out);
    }
    ensure(out.iter().all(|x| !x.to_f64().is_nan()), || "out without denominators: not all of it was written".into())
}

/// A tensor `[batch, token, head, feature]` with a gap after every row, batch entry and head: NaN in what is read, a
/// mark in what is written.
struct Gapped<T> {
    data: Vec<T>,
    strides: [usize; 3],
    shape: [usize; 4],
}

/// Fills the gaps of tensors to be written.
const MARK: f64 = 4711.0;

impl<T: Number> Gapped<T> {
    fn new(shape: [usize; 4], gap: T) -> Self {
        let row = shape[3] + 3;
        let token = row * shape[1] + 2;
        let batch = token * shape[2] + 5;
        Self { data: vec![gap; batch * shape[0]], strides: [batch, row, token], shape }
    }

    fn of(shape: [usize; 4], numbers: &[T]) -> Self {
        let mut gapped = Self::new(shape, execute::nan());
        for (n, offset) in gapped.offsets().into_iter().enumerate() {
            gapped.data[offset] = numbers[n];
        }
        gapped
    }

    /// The offset of each element of the row-major tensor.
    fn offsets(&self) -> Vec<usize> {
        let [batch, heads, tokens, width] = self.shape;
        let mut offsets = Vec::new();
        for b in 0..batch {
            for h in 0..heads {
                for t in 0..tokens {
                    let start = b * self.strides[0] + h * self.strides[1] + t * self.strides[2];
                    offsets.extend(start..start + width);
                }
            }
        }
        offsets
    }

    fn view(&self) -> View<'_, T> {
        View::strided(&self.data, self.strides)
    }

    fn view_mut(&mut self) -> ViewMut<'_, T> {
        ViewMut::strided(&mut self.data, self.strides)
    }

    /// The row-major numbers, after checking that the gaps are as they were.
    fn numbers(&self, what: &str) -> Result<Vec<T>, Failure> {
        let offsets = self.offsets();
        let mut gap = vec![true; self.data.len()];
        offsets.iter().for_each(|&offset| gap[offset] = false);
        let intact = gap.iter().zip(&self.data).all(|(&gap, x)| !gap || x.to_f64() == MARK);
        ensure(intact, || format!("{what}: something was written between the rows"))?;
        Ok(offsets.into_iter().map(|offset| self.data[offset]).collect())
    }
}

/// Strided tensors with gaps give the same bits as contiguous ones, and nothing is read or written in the gaps.
pub fn strides_do_not_matter<T: Number>(subject: &Subject, case: &Case) -> Result<(), Failure> {
    let dims = &case.dims;
    let inputs = execute::random(subject, case).cast::<T>();
    let (forward, backward) = execute::both(subject, case, &inputs)?;
    let (got, got_back) = strided(subject, case, &inputs)?;
    same_bits("out through strides", &got.out, &forward.out)?;
    same_gradients("through strides", &got_back, &backward)?;
    // A stride of 0 repeats a batch entry.
    let key_shape = inputs.key_shape(dims);
    if dims.batch > 1 && len3(dims.q()) > 0 && len3(key_shape) > 0 && len3(dims.v()) > 0 {
        let mut repeated = inputs.clone();
        for (x, entry) in
            [(&mut repeated.q, len3(dims.q())), (&mut repeated.k, len3(key_shape)), (&mut repeated.v, len3(dims.v()))]
        {
            for batch in 1..dims.batch {
                x.copy_within(0..entry, batch * entry);
            }
        }
        let expected = execute::forward(subject, case, &repeated)?;
        let once = |shape: [usize; 4]| [0, shape[2] * shape[3], shape[3]];
        let parameters: Vec<&[T]> = inputs.parameters.iter().map(Vec::as_slice).collect();
        let call = Call::new(
            *dims,
            View::strided(&inputs.q[..len3(dims.q())], once(dims.q())),
            View::strided(&inputs.k[..len3(key_shape)], once(key_shape)),
            View::strided(&inputs.v[..len3(dims.v())], once(dims.v())),
        )
        .with_parameters(&parameters)
        .with_mask(case.mask());
        let mut out = vec![execute::nan(); expected.out.len()];
        // With denominators, as in the expected call: without them another algorithm might run.
        let mut denominators = vec![execute::nan(); expected.denominators.len()];
        let output = Output::training(ViewMut::contiguous(&mut out, dims.out()), &mut denominators);
        T::mechanism(subject).forward(&call, output, &mut Scratch::new())?;
        same_bits("out of a repeated batch entry", &out, &expected.out)?;
    }
    Ok(())
}

/// Elements of one batch entry.
fn len3(shape: [usize; 4]) -> usize {
    shape[1] * shape[2] * shape[3]
}

fn strided<T: Number>(
    subject: &Subject,
    case: &Case,
    inputs: &crate::case::Inputs<T>,
) -> Result<(Forward<T>, Backward<T>), Failure> {
    let dims = &case.dims;
    let mark = T::from_f64(MARK);
    let key_shape = inputs.key_shape(dims);
    let (q, k, v) =
        (Gapped::of(dims.q(), &inputs.q), Gapped::of(key_shape, &inputs.k), Gapped::of(dims.v(), &inputs.v));
    let d_out = Gapped::of(dims.out(), &inputs.d_out);
    let mut out = Gapped::new(dims.out(), mark);
    let mut denominators = vec![execute::nan(); execute::len(T::mechanism(subject).denominators(dims))];
    let parameters: Vec<&[T]> = inputs.parameters.iter().map(Vec::as_slice).collect();
    let call = Call::new(*dims, q.view(), k.view(), v.view()).with_parameters(&parameters).with_mask(case.mask());
    let mechanism = T::mechanism(subject);
    let output = Output::training(out.view_mut(), &mut denominators);
    mechanism.forward(&call, output, &mut Scratch::new())?;
    let [mut dq, mut dk, mut dv] =
        [Gapped::new(dims.q(), mark), Gapped::new(key_shape, mark), Gapped::new(dims.v(), mark)];
    let mut d_parameters: Vec<Vec<T>> = inputs.parameters.iter().map(|p| vec![execute::nan(); p.len()]).collect();
    let mut slices: Vec<&mut [T]> = d_parameters.iter_mut().map(Vec::as_mut_slice).collect();
    let cotangent = Cotangent { out: out.view(), denominators: &denominators, d_out: d_out.view(), final_state: None };
    let gradients = Gradients {
        dq: dq.view_mut(),
        dk: dk.view_mut(),
        dv: dv.view_mut(),
        parameters: &mut slices,
        initial_state: None,
    };
    mechanism.backward(&call, &cotangent, gradients, &mut Scratch::new())?;
    let mut gradients = vec![dq.numbers("dq")?, dk.numbers("dk")?, dv.numbers("dv")?];
    gradients.extend(d_parameters);
    Ok((Forward { out: out.numbers("out")?, denominators }, Backward { gradients }))
}
