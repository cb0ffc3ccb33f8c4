//! What tests of models share.
#![allow(dead_code, reason = "each test file uses its part")]

use burn::tensor::Tensor;
use longspan::models::BlockConfig;

/// A small block, without dropout.
pub fn block() -> BlockConfig {
    BlockConfig::new().with_d_model(16).with_heads(2).with_d_ff(24).with_dropout(0.0)
}

pub fn numbers<const D: usize>(x: Tensor<D>) -> Vec<f32> {
    x.try_into_vec_as::<f32>().unwrap()
}

/// Asserts that numbers differ by less than `tolerance`, beside 1 and themselves.
#[track_caller]
pub fn assert_close(name: &str, got: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(got.len(), expected.len(), "{name}");
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        let close = (got - expected).abs() < tolerance * (1.0 + expected.abs());
        assert!(close, "{name}: at {i} {got} instead of {expected}");
    }
}
