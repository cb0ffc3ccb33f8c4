//! Learns a table of Shaw's relative positions by gradient descent until attention gives the outputs that another table gave.

use longspan_kernels::{
    Call, Cotangent, Dims, Error, Gradients, Kernel, KernelizedAttention, Mask, Output, Score, Scratch, Shaw, View,
    ViewMut,
};

const TOKENS: usize = 64;
const HEAD_DIM: usize = 16;
const RADIUS: usize = 4;

fn numbers(len: usize, seed: f32) -> Vec<f32> {
    (0..len).map(|n| (n as f32 * seed).sin()).collect()
}

fn main() -> Result<(), Error> {
    let attention = KernelizedAttention { score: Score::Combined(Shaw::new(RADIUS)), ..Default::default() };
    let dims = Dims::square(1, 1, TOKENS, HEAD_DIM);
    let len = TOKENS * HEAD_DIM;
    let (q, k, v) = (numbers(len, 0.31), numbers(len, 0.47), numbers(len, 0.73));
    let mut scratch = Scratch::new();

    // Outputs and denominators by a table of [heads, distances, head_dim].
    let mut forward = |table: &[f32]| -> Result<(Vec<f32>, Vec<f32>), Error> {
        let (mut out, mut denominators) = (vec![0.0; len], vec![0.0; TOKENS]);
        let parameters = [table];
        let output = Output::training(ViewMut::contiguous(&mut out, dims.out()), &mut denominators);
        attention.forward(&call(dims, &q, &k, &v, &parameters), output, &mut scratch)?;
        Ok((out, denominators))
    };
    let distances = 2 * RADIUS + 1;
    let (wanted, _) = forward(&numbers(distances * HEAD_DIM, 0.59))?;

    let mut scratch = Scratch::new();
    let mut table = vec![0.0; distances * HEAD_DIM];
    let mut first = None;
    for step in 0..=400 {
        let (out, denominators) = forward(&table)?;
        let d_out: Vec<f32> = out.iter().zip(&wanted).map(|(out, wanted)| out - wanted).collect();
        let loss = d_out.iter().map(|d| d * d).sum::<f32>() / 2.0;
        let first = *first.get_or_insert(loss);
        if step % 100 == 0 {
            println!("step {step:3}: loss {loss:.5}");
        }
        if step == 400 {
            assert!(loss < 0.2 * first, "the table was not learned");
            break;
        }
        let (mut dq, mut dk, mut dv) = (vec![0.0; len], vec![0.0; len], vec![0.0; len]);
        let mut d_table = vec![0.0; table.len()];
        let parameters = [table.as_slice()];
        let cotangent = Cotangent {
            out: View::contiguous(&out, dims.out()),
            denominators: &denominators,
            d_out: View::contiguous(&d_out, dims.out()),
            final_state: None,
        };
        let gradients = Gradients {
            dq: ViewMut::contiguous(&mut dq, dims.q()),
            dk: ViewMut::contiguous(&mut dk, dims.k()),
            dv: ViewMut::contiguous(&mut dv, dims.v()),
            parameters: &mut [&mut d_table],
            initial_state: None,
        };
        attention.backward(&call(dims, &q, &k, &v, &parameters), &cotangent, gradients, &mut scratch)?;
        table.iter_mut().zip(&d_table).for_each(|(x, d)| *x -= 0.5 * d);
    }
    Ok(())
}

fn call<'a>(dims: Dims, q: &'a [f32], k: &'a [f32], v: &'a [f32], parameters: &'a [&'a [f32]]) -> Call<'a, f32> {
    Call::row_major(dims, [q, k, v]).with_parameters(parameters).with_mask(Mask::causal())
}
