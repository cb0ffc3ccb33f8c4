//! Times training steps of a causal model: 4 pre-norm blocks of width 256 with GELU, 256 symbols, AdamW, one sequence.
//!
//! Arguments: the tokens (4096), then `shaw` (default), `kernelized` or `softmax`, then how many steps.
use std::time::Instant;

use burn::module::Module;
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Int, Tensor, TensorData};
use longspan::attention::{AttentionConfig, AttentionMask};
use longspan::layers::{Activation, FusedAdamW, TokenNorm, TokenNormConfig, cross_entropy};
use longspan::models::{EncoderBlock, EncoderBlockConfig};

#[derive(Module, Debug)]
struct Model {
    embedding: Embedding,
    blocks: Vec<EncoderBlock>,
    norm: TokenNorm,
    output: Linear,
}

fn main() -> longspan::Result<()> {
    let args: Vec<String> = std::env::args().collect();
    let tokens: usize = args.get(1).map_or(4096, |x| x.parse().unwrap());
    let attention = match args.get(2).map(String::as_str) {
        Some("softmax") => AttentionConfig::softmax(),
        Some("kernelized") => AttentionConfig::kernelized(),
        _ => AttentionConfig::shaw(),
    };
    let steps: usize = args.get(3).map_or(10, |x| x.parse().unwrap());
    let device = Device::flex().autodiff();
    device.seed(1);
    let block = EncoderBlockConfig::new(256, 4, 1024)
        .with_dropout(0.0)
        .with_activation(Activation::Gelu)
        .with_attention(attention);
    let mut model = Model {
        embedding: EmbeddingConfig::new(256, 256).init(&device),
        blocks: (0..4).map(|_| block.init(&device)).collect::<Result<_, _>>()?,
        norm: TokenNormConfig::new(256).init(&device)?,
        output: LinearConfig::new(256, 256).init(&device),
    };
    let mut optimizer = ModuleOptimizer::from(FusedAdamW::new(0.9, 0.98, 1e-9, 0.01));
    let ids: Vec<i64> = (0..tokens as i64).map(|i| i * i % 256).collect();
    let next: Vec<Option<u32>> = (0..tokens).map(|i| ids.get(i + 1).map(|&id| id as u32)).collect();
    let mut best = [f64::INFINITY; 3];
    for _ in 0..steps {
        let start = Instant::now();
        let ids = Tensor::<2, Int>::from_data(TensorData::new(ids.clone(), [1, tokens]), &device);
        let mut x = model.embedding.forward(ids);
        for block in &model.blocks {
            x = block.forward(x, &AttentionMask::causal())?;
        }
        let loss = cross_entropy(model.norm.forward(x), &model.output, next.clone(), 0.0)?;
        let forward = Instant::now();
        let gradients = loss.smoothed.div_scalar(tokens as f64).backward();
        let backward = Instant::now();
        let gradients = GradientsParams::from_grads(gradients, &model);
        model = optimizer.step(1e-3, model, gradients);
        let times = [forward - start, backward - forward, backward.elapsed()];
        for (best, time) in best.iter_mut().zip(times) {
            *best = best.min(time.as_secs_f64());
        }
    }
    let [forward, backward, step] = best.map(|seconds| 1e3 * seconds);
    let all = forward + backward + step;
    println!(
        "forward {forward:.1} ms, backward {backward:.1} ms, optimizer {step:.1} ms: {:.0} tokens/s",
        1e3 * tokens as f64 / all
    );
    Ok(())
}
