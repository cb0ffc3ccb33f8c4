//! What `auto` runs: the algorithm that the plan names, and under a backward the one whose denominators it is given.

use longspan_kernels::{
    Algorithm, Bias, Dims, FeatureMap, Fourier, KernelizedAttention, Output, Purpose, Score, Scratch, Shaw, Toeplitz,
    ViewMut,
};
use longspan_testing::compare::{same_bits, same_gradients};
use longspan_testing::{Assumptions, Case, Failure, Number, Subject, execute};

const LENGTHS: [usize; 14] = [1, 2, 5, 12, 24, 32, 48, 64, 80, 96, 128, 144, 200, 330];

/// A forward call alone, then one with its backward, each held to the algorithm that `plan` names for it. Whether these
/// differ.
fn held(make: &dyn Fn(Algorithm) -> Subject, case: &Case) -> Result<bool, Failure> {
    let auto = make(Algorithm::Auto);
    let inputs = execute::random(&auto, case).cast::<f32>();
    let output_alone = |subject: &Subject| {
        let mut out = vec![f32::NAN; case.dims.batch * case.dims.heads * case.dims.queries * case.dims.value_dim];
        inputs.call(case, None, |call| {
            let out = ViewMut::contiguous(&mut out, case.dims.out());
            let output = Output::new(out);
            f32::mechanism(subject).forward(call, output, &mut Scratch::new())
        })?;
        Ok::<_, Failure>(out)
    };
    let mut named = [Algorithm::Auto; 2];
    inputs.call(case, None, |call| {
        let plan = f32::mechanism(&auto).plan(&call.dims, &call.mask);
        named = Purpose::ALL.map(|purpose| plan.algorithm(purpose));
        Ok::<_, Failure>(())
    })?;
    let [alone, with_backward] = named.map(make);
    same_bits("out alone", &output_alone(&auto)?, &output_alone(&alone)?)?;
    let results = [&auto, &with_backward].map(|subject| {
        let forward = execute::forward(subject, case, &inputs)?;
        let backward = execute::backward(subject, case, &inputs, &forward)?;
        Ok::<_, Failure>((forward, backward))
    });
    let [got, expected] = results;
    let ((got, got_back), (expected, expected_back)) = (got?, expected?);
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
