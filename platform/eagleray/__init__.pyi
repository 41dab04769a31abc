from eagleray.api.data import index as index
from eagleray.api.data import loader as loader
from eagleray.api.data import prepare as prepare
from eagleray.api.evaluate import Refused as Refused
from eagleray.api.evaluate import Scores as Scores
from eagleray.api.evaluate import evaluate as evaluate
from eagleray.api.export import export as export
from eagleray.api.export import load as load
from eagleray.api.jobs import Job as Job
from eagleray.api.jobs import job as job
from eagleray.api.jobs import jobs as jobs
from eagleray.api.jobs import submit as submit
from eagleray.api.pretrain import finetune as finetune
from eagleray.api.pretrain import pretrain as pretrain
from eagleray.api.report import report as report
from eagleray.api.run import Run as Run
from eagleray.api.stream import Loader as Loader
from eagleray.api.tune import tune as tune
from eagleray.base.errors import Outage as Outage
from eagleray.base.errors import UserError as UserError
from eagleray.data.batch import Batch as Batch

__version__: str
