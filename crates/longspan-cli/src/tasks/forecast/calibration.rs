//! Intervals that hold as many development values as they promise: a model is surest of the windows that it learned from.

use burn::tensor::{Tensor, TensorData};
use longspan::models::SeriesModel;

use super::{MEDIAN, QUANTILES};

/// How far development values lie from the median, for each interval as a share of how far its end does: 1 at the end.
#[derive(Debug, Default)]
pub struct Distances([Vec<f32>; MEDIAN]);

impl Distances {
    /// Of a target, and what the model gives for it, in order.
    pub fn add(&mut self, target: f32, row: &[f32]) {
        for (level, all) in self.0.iter_mut().enumerate() {
            let (away, end) = if target < row[MEDIAN] {
                (row[MEDIAN] - target, row[MEDIAN] - row[level])
            } else {
                (target - row[MEDIAN], row[QUANTILES.len() - 1 - level] - row[MEDIAN])
            };
            if !target.is_nan() {
                all.push(if away <= 0.0 { 0.0 } else { away / end.max(f32::MIN_POSITIVE) });
            }
        }
    }

    /// How many times as wide each interval has to be to hold its share of the values and of one more (split conformal prediction, Vovk et
    /// al. 2005, with the ratio of Kivaranovic et al. 2020). None becomes narrower: these values chose the weights.
    fn factors(mut self) -> [f32; MEDIAN] {
        std::array::from_fn(|level| {
            let all = &mut self.0[level];
            all.sort_unstable_by(f32::total_cmp);
            let share = f64::from(QUANTILES[QUANTILES.len() - 1 - level] - QUANTILES[level]);
            let rank = ((all.len() + 1) as f64 * share - 1e-4).ceil() as usize;
            all.get(rank.min(all.len()).saturating_sub(1)).map_or(1.0, |found| found.clamp(1.0, 10.0))
        })
    }
}

/// The model whose intervals are that much wider, or none if they are wide enough. Quantiles are columns of its last layer, so that the
/// distances of two are a layer as well.
pub fn widened(mut model: SeriesModel, distances: Distances) -> Option<SeriesModel> {
    let factors = distances.factors();
    // A resumed run has been widened before, to rounding.
    if factors.iter().all(|factor| *factor < 1.001) {
        return None;
    }
    let count = QUANTILES.len();
    // `median + factor · (quantile − median)`, of what each column gives to which.
    let mut mix = vec![0.0; count * count];
    for quantile in 0..count {
        let factor = if quantile == MEDIAN { 1.0 } else { factors[quantile.min(count - 1 - quantile)] };
        mix[MEDIAN * count + quantile] += 1.0 - factor;
        mix[quantile * count + quantile] += factor;
    }
    let mixed = |columns: Tensor<2>| -> Tensor<2> {
        let [rows, width] = columns.dims();
        let mix = Tensor::<2>::from_data(TensorData::new(mix.clone(), [count, count]), &columns.device());
        columns.reshape([rows * width / count, count]).matmul(mix).reshape([rows, width])
    };
    model.output.weight = model.output.weight.map(&mixed);
    model.output.bias = model.output.bias.map(|bias| bias.map(|bias| mixed(bias.unsqueeze()).squeeze_dim(0)));
    Some(model)
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;
    use longspan::models::SeriesModelConfig;

    use super::*;

    #[test]
    fn intervals_are_as_wide_as_development_values_want_them() {
        let device = Device::flex();
        let model = SeriesModelConfig::new(1, 2 * QUANTILES.len()).with_causal(true).init(&device).unwrap();
        let points = Tensor::<3>::from_data([[[0.5], [-1.0], [2.0]]], &device);
        let told = |model: &SeriesModel| -> Vec<Vec<f32>> {
            let times = Tensor::from_data([[0.0, 1.0, 2.0]], &device);
            let found: Vec<f32> =
                model.at_points(points.clone(), times, &[3]).unwrap().into_data().try_to_vec().unwrap();
            found.chunks(QUANTILES.len()).map(<[f32]>::to_vec).collect()
        };
        let (mut distances, row) = (Distances::default(), [-1.0, -0.5, 0.0, 1.0, 4.0]);
        // Of nine values half lie within 2.5 times the quarters and four of five within 1.25 times the tenths; one is missing.
        for target in [0.5, -0.5, 1.0, -0.25, 2.5, -1.5, -1.25, 2.75, 3.0, f32::NAN] {
            distances.add(target, &row);
        }
        assert_eq!(distances.0.each_ref().map(Vec::len), [9, 9]);
        let wider = widened(model.clone(), distances).unwrap();
        for (before, after) in told(&model).iter().zip(told(&wider)) {
            let of = |n: usize| before[MEDIAN] + [1.25, 2.5, 1.0, 2.5, 1.25][n] * (before[n] - before[MEDIAN]);
            assert!((0..QUANTILES.len()).all(|n| (after[n] - of(n)).abs() < 1e-4), "{before:?} {after:?}");
        }
        let mut near = Distances::default();
        (0..20).for_each(|_| near.add(0.1, &row));
        assert!(widened(model.clone(), near).is_none() && widened(model, Distances::default()).is_none());
    }
}
