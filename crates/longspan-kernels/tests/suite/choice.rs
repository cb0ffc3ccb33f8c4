//! What `auto` runs: the algorithm that the plan names, and under a backward the one whose denominators it is given.

use longspan_kernels::{
    Algorithm, Bias, Dims, FeatureMap, Fourier, KernelizedAttention, Purpose, Score, Scratch, Shaw, Toeplitz,
};
use longspan_testing::compare::{same_bits, same_gradients};
use longspan_testing::{Assumptions, Case, Failure, Number, Subject, execute};

const LENGTHS: [usize; 14] = [1, 2, 5, 12, 24, 32, 48, 64, 80, 96, 128, 144, 200, 330];

/// A forward call alone, then one with its backward, each held to the algorithm that `plan` names for it. Whether these
/// differ.
fn held(make: &dyn Fn(Algorithm) -> Subject, case: &Case) -> Result<bool, Failure> {
    let auto = make(Algorithm::Auto);
    let inputs = execute::random(&auto, case).cast::<f32>();
    let alone = |subject: &Subject| execute::output_alone(subject, case, &inputs, &mut Scratch::new());
    let plan = f32::mechanism(&auto).plan(&case.dims, &case.mask())?;
    let named = Purpose::ALL.map(|purpose| plan.algorithm(purpose));
    let [inference, training] = named.map(make);
    same_bits("out alone", &alone(&auto)?, &alone(&inference)?)?;
    let (got, got_back) = execute::both(&auto, case, &inputs)?;
    let (expected, expected_back) = execute::both(&training, case, &inputs)?;
    same_bits("out with a backward", &got.out, &expected.out)?;
    same_bits("denominators", &got.denominators, &expected.denominators)?;
    same_gradients("with a backward", &got_back, &expected_back)?;
    Ok(named[0] != named[1])
}

#[test]
fn a_backward_runs_the_algorithm_of_its_forward() {
    // Denominators of this map stand beside running maxima that are each algorithm's own.
    let feature_map = FeatureMap::Exp;
    let kernelized = |score: Score| -> Box<dyn Fn(Algorithm) -> Subject> {
        Box::new(move |algorithm| {
            Subject::kernelized(&KernelizedAttention { feature_map, score, algorithm, ..Default::default() })
        })
    };
    let toeplitz = |bias: Bias| -> Box<dyn Fn(Algorithm) -> Subject> {
        Box::new(move |algorithm| {
            let toeplitz = Toeplitz { feature_map, algorithm, ..Toeplitz::new(bias) };
            Subject::new(toeplitz, Assumptions::default())
        })
    };
    let makes = [
        ("kernelized", kernelized(Score::Content)),
        ("shaw", kernelized(Score::Combined(Shaw::new(10)))),
        ("relative", kernelized(Score::Relative(Shaw::new(10)))),
        ("fourier", kernelized(Score::Fourier(Fourier::default()))),
        ("toeplitz", toeplitz(Bias::clipped(16))),
    ];
    let mut turned = 0;
    for (name, make) in &makes {
        for length in LENGTHS {
            for causal in [true, false] {
                let case = Case::new(Dims::square(1, 2, length, 64), causal);
                match held(&**make, &case) {
                    Ok(differs) => turned += usize::from(differs),
                    Err(failure) => panic!("{name}, {length} tokens, causal {causal}: {failure}"),
                }
            }
        }
    }
    assert!(turned > 0, "no backward turned a choice: nothing was tested");
}
