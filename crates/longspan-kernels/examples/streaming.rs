//! Reads a prompt in one call, then goes on token by token from its state, in constant time and memory: the same outputs as
//! one call over all tokens.

use longspan_kernels::{
    Call, Dims, Error, Kernel, KernelizedAttention, Mask, Output, Scratch, State, Token, View, ViewMut,
};

const HEAD_DIM: usize = 32;
const PROMPT: usize = 1000;
const TOKENS: usize = 1200;

/// The outputs of the first `tokens` tokens of `x`, which are queries, keys and values in one, and the state after them.
fn attend(attention: &KernelizedAttention, x: &[f32], tokens: usize) -> Result<(Vec<f32>, State<f32>), Error> {
    let dims = Dims::square(1, 1, tokens, HEAD_DIM);
    let x = View::contiguous(&x[..tokens * HEAD_DIM], dims.q());
    let call = Call::new(dims, x, x, x).with_mask(Mask::causal());
    let mut out = vec![0.0; tokens * HEAD_DIM];
    let mut state = attention.empty_state(&dims)?;
    let output = Output::new(ViewMut::contiguous(&mut out, dims.out())).with_final_state(Some(&mut state));
    attention.forward(&call, output, &mut Scratch::new())?;
    Ok((out, state))
}

fn main() -> Result<(), Error> {
    let attention = KernelizedAttention::default();
    let x: Vec<f32> = (0..TOKENS * HEAD_DIM).map(|n| (n as f32 * 0.37).sin()).collect();
    let (whole, _) = attend(&attention, &x, TOKENS)?;

    let (_, mut state) = attend(&attention, &x, PROMPT)?;
    let mut worst = 0.0f32;
    let mut out = vec![0.0; HEAD_DIM];
    for (x, expected) in x.chunks_exact(HEAD_DIM).zip(whole.chunks_exact(HEAD_DIM)).skip(PROMPT) {
        attention.step(&Token { q: x, k: x, v: x, parameters: &[] }, &mut state, &mut out)?;
        worst = out.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(worst, f32::max);
    }
    println!("{} tokens streamed from a state of {} numbers", TOKENS - PROMPT, state.numbers().len());
    println!("largest difference from one call over all {TOKENS} tokens: {worst:.1e}");
    assert!(worst < 1e-4);
    Ok(())
}
