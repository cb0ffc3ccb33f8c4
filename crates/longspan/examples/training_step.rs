//! Times training steps of a language model: 4 blocks of width 256 with GELU, 256 symbols, AdamW, one sequence.
//!
//! Arguments: the tokens (4096), then `shaw` (default) or another mechanism, then how many steps.
use std::time::Instant;

use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Int, Tensor, TensorData};
use longspan::attention::AttentionConfig;
use longspan::layers::{Activation, FusedAdamW};
use longspan::models::{BlockConfig, LanguageModelConfig};

fn main() -> longspan::Result<()> {
    let args: Vec<String> = std::env::args().collect();
    let tokens: usize = args.get(1).map_or(4096, |x| x.parse().expect("a number of tokens"));
    let name = args.get(2).map_or("shaw", String::as_str);
    let steps: usize = args.get(3).map_or(10, |x| x.parse().expect("a number of steps"));
    let attention = AttentionConfig::by_name(name).expect("the name of a mechanism");

    let device = Device::flex().autodiff();
    let block = BlockConfig::new().with_d_model(256).with_d_ff(1024);
    let mut model = LanguageModelConfig::new(256)
        .with_block(block.with_dropout(0.0).with_activation(Activation::Gelu))
        .with_attention(vec![attention])
        .init(&device)?;
    let mut optimizer = ModuleOptimizer::from(FusedAdamW::new(0.9, 0.98, 1e-9, 0.01));
    let ids: Vec<i64> = (0..tokens as i64).map(|n| n * n % 256).collect();
    let next: Vec<Option<u32>> = (1..=tokens).map(|n| ids.get(n).map(|&id| id as u32)).collect();
    let text = Tensor::<2, Int>::from_data(TensorData::new(ids, [1, tokens]), &device);
    let mut best = [f64::INFINITY; 3];
    for _ in 0..steps {
        let start = Instant::now();
        let loss = model.loss(text.clone(), next.clone(), 0.0)?;
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
    let rate = tokens as f64 / best.iter().sum::<f64>();
    let [forward, backward, step] = best.map(|seconds| 1e3 * seconds);
    println!("forward {forward:.1} ms, backward {backward:.1} ms, optimizer {step:.1} ms: {rate:.0} tokens/s");
    Ok(())
}
