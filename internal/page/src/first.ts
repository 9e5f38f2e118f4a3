// What the first screen asks for, sent before the code of the screens is there. The screen's own
// requests take these answers, which are under way by then.

import { parse } from './fragment';
import { ahead, takeToken } from './http';
import * as requests from './requests';

takeToken(); // before the fragment is read

const { parts, query } = parse(location.hash);
const [screen, run, kind, id] = parts;

function begin([path, rest]: requests.Request): Promise<Response> | undefined {
  return ahead(path, { ...rest, as_of: Number(query.as_of) || 0 });
}

/** chart asks for the metric of a run, as soon as it is known which. */
async function chart(run: string) {
  const answer = await begin(requests.trials(run));
  if (!answer?.ok) return;
  const { trials } = await answer.clone().json();
  const trial = requests.trialOf<{ name: string; last_metrics?: Record<string, unknown> }>(trials, query.trial);
  const metric = query.metric || requests.mainMetric(trial?.last_metrics);
  if (trial && metric) await begin(requests.chart(run, trial.name, metric, query));
}

ahead(...requests.store());
if (screen === undefined) {
  begin(requests.runs(query.page ?? ''));
  begin(requests.atRisk());
} else if (screen === 'runs' && kind === 'c' && id) {
  begin(requests.checkpoint(run, id, '', { trial: query.trial }));
  begin(requests.checkpoint(run, id, '/save', { trial: query.trial }));
} else if (screen === 'runs' && parts.length === 2) {
  begin(requests.run(run));
  void chart(run).catch(() => {}); // the screen shows the error
  begin(requests.saves(run));
}
