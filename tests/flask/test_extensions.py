"""With the extensions that Flask applications have: a first run, a replay, a reused key and a missing key of each."""

from __future__ import annotations

import gzip
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from flask import Flask, Response, g, jsonify, request
from flask.testing import FlaskClient
from werkzeug.test import TestResponse

from idemredis.flask import current_reservation
from tests.support.site import MakeSite, Site

KEY = "k1"


class Case:
    """One application with an extension, and how its protected endpoint is called."""

    def __init__(self, site: Site, path: str = "/charges", client: FlaskClient | None = None, **options: Any) -> None:
        self.site = site
        self.client = client
        self.path = path
        self.options = options

    def send(self, key: str | None = KEY, amount: int = 1000, **more: Any) -> TestResponse:
        options = {"json": {"amount": amount}, **self.options, **more}
        if self.client is None:
            return self.site.send(key, self.path, **options)
        headers = [*options.pop("headers", ()), *([] if key is None else [("Idempotency-Key", key)])]
        return self.client.post(self.path, headers=headers, **options)


def _run(site: Site) -> dict[str, Any]:
    """Stand for the view's work."""
    site.runs.append(current_reservation.key)
    return {"id": len(site.runs), "amount": request.get_json()["amount"]}


def _add(site: Site) -> None:
    view = site.idempotency.protect(lambda: (_run(site), 201))
    site.app.add_url_rule("/charges", "charges", view, methods=["POST"])


def _restx(make_site: MakeSite) -> Case:
    restx = pytest.importorskip("flask_restx")
    site = make_site()
    api = restx.Api(site.app)
    model = api.model("Charge", {"id": restx.fields.Integer, "amount": restx.fields.Integer})

    class Charges(restx.Resource):  # type: ignore[misc, name-defined]
        @api.marshal_with(model, code=201)
        @site.idempotency.protect
        def post(self) -> Any:
            return _run(site), 201

    api.add_resource(Charges, "/charges")
    return Case(site)


def _restx_whole(make_site: MakeSite) -> Case:
    restx = pytest.importorskip("flask_restx")
    site = make_site()
    api = restx.Api(site.app)
    model = api.model("Charge", {"id": restx.fields.Integer, "amount": restx.fields.Integer})

    class Charges(restx.Resource):  # type: ignore[misc, name-defined]
        method_decorators = [site.idempotency.protect]  # noqa: RUF012  # as the library declares it

        @api.marshal_with(model, code=201)
        def post(self) -> Any:
            return _run(site), 201

    api.add_resource(Charges, "/charges")
    return Case(site)


def _restful(make_site: MakeSite) -> Case:
    restful, fields = pytest.importorskip("flask_restful"), pytest.importorskip("flask_restful.fields")
    site = make_site()
    api = restful.Api(site.app)

    class Charges(restful.Resource):  # type: ignore[misc, name-defined]
        @restful.marshal_with({"id": fields.Integer, "amount": fields.Integer})
        @site.idempotency.protect
        def post(self) -> Any:
            return _run(site), 201

    api.add_resource(Charges, "/charges")
    return Case(site)


def _smorest(make_site: MakeSite) -> Case:
    smorest, marshmallow = pytest.importorskip("flask_smorest"), pytest.importorskip("marshmallow")
    app = Flask("shop")
    app.config.update(API_TITLE="shop", API_VERSION="1", OPENAPI_VERSION="3.0.3")
    site = make_site(app=app)
    schema = marshmallow.Schema.from_dict({"id": marshmallow.fields.Int(), "amount": marshmallow.fields.Int()})
    blueprint = smorest.Blueprint("charges", __name__)

    @blueprint.route("/charges", methods=["POST"])
    @blueprint.arguments(schema)
    @blueprint.response(201, schema)
    @site.idempotency.protect
    def charge(data: Any) -> Any:
        return _run(site)

    smorest.Api(app).register_blueprint(blueprint)
    return Case(site)


def _apiflask(make_site: MakeSite) -> Case:
    apiflask = pytest.importorskip("apiflask")
    app = apiflask.APIFlask("shop")
    app.config["BASE_RESPONSE_SCHEMA"] = apiflask.Schema.from_dict(
        {"data": apiflask.fields.Field(), "message": apiflask.fields.String(), "code": apiflask.fields.Integer()}
    )
    site = make_site(app=app)
    schema = apiflask.Schema.from_dict({"id": apiflask.fields.Integer(), "amount": apiflask.fields.Integer()})

    @app.post("/charges")
    @app.output(schema, status_code=201)
    @site.idempotency.protect
    def charge() -> Any:
        return {"data": _run(site), "message": "made", "code": 201}

    return Case(site)


def _login(make_site: MakeSite) -> Case:
    flask_login = pytest.importorskip("flask_login")
    app = Flask("shop")
    app.secret_key = "secret"
    manager = flask_login.LoginManager(app)

    class User(flask_login.UserMixin):  # type: ignore[misc, name-defined]
        id = "acme"

    manager.request_loader(lambda request: User() if request.headers.get("Authorization") == "acme" else None)
    site = make_site(app=app, principal=lambda: flask_login.current_user.get_id())

    @app.post("/charges")
    @flask_login.login_required
    @site.idempotency.protect
    def charge() -> Any:
        return _run(site), 201

    return Case(site, headers=[("Authorization", "acme")])


def _jwt(make_site: MakeSite) -> Case:
    jwt = pytest.importorskip("flask_jwt_extended")
    app = Flask("shop")
    app.config["JWT_SECRET_KEY"] = "a secret of more than thirty-two bytes"
    jwt.JWTManager(app)
    site = make_site(app=app, principal=jwt.get_jwt_identity)

    @app.post("/charges")
    @jwt.jwt_required()
    @site.idempotency.protect
    def charge() -> Any:
        return _run(site), 201

    with app.app_context():
        token = jwt.create_access_token("acme")
    return Case(site, headers=[("Authorization", f"Bearer {token}")])


_engines: list[Any] = []


@pytest.fixture(autouse=True)
def engines_are_disposed() -> Iterator[None]:
    yield
    while _engines:
        _engines.pop().dispose()


def _sqlite() -> Any:
    sqlalchemy = pytest.importorskip("sqlalchemy")
    _engines.append(sqlalchemy.create_engine("sqlite://", poolclass=sqlalchemy.pool.StaticPool))
    return _engines[-1]


def _sqlalchemy(make_site: MakeSite) -> Case:
    sqlalchemy, orm = pytest.importorskip("sqlalchemy"), pytest.importorskip("sqlalchemy.orm")
    engine = _sqlite()
    with engine.begin() as connection:
        connection.execute(sqlalchemy.text("create table charges (id integer primary key, amount integer unique)"))
    session = orm.scoped_session(orm.sessionmaker(engine))
    site = make_site()

    @site.app.post("/charges")
    @site.idempotency.protect
    def charge() -> Any:
        made = _run(site)
        session.execute(sqlalchemy.text("insert into charges values (:id, :amount)"), made)
        return made, 201

    @site.app.after_request
    def commit(response: Response) -> Response:
        session.commit()
        return response

    @site.app.teardown_appcontext
    def remove(error: BaseException | None) -> None:
        session.remove()

    return Case(site)


def _compress(make_site: MakeSite) -> Case:
    compress = pytest.importorskip("flask_compress")
    app = Flask("shop")
    app.config.update(COMPRESS_MIN_SIZE=1, COMPRESS_ALGORITHM=["gzip"])
    compress.Compress(app)
    site = make_site(app=app)
    _add(site)
    return Case(site, headers=[("Accept-Encoding", "gzip")])


def _cors(make_site: MakeSite) -> Case:
    cors = pytest.importorskip("flask_cors")
    app = Flask("shop")
    cors.CORS(app, expose_headers=["Idempotent-Replayed", "Retry-After"])
    site = make_site(app=app)
    _add(site)
    return Case(site, headers=[("Origin", "https://shop.example")])


def _limiter(make_site: MakeSite) -> Case:
    limiter, util = pytest.importorskip("flask_limiter"), pytest.importorskip("flask_limiter.util")
    app = Flask("shop")
    limits = limiter.Limiter(util.get_remote_address, app=app, storage_uri="memory://", headers_enabled=True)
    site = make_site(app=app)

    @app.post("/charges")
    @limits.limit("100/minute")
    @site.idempotency.protect
    def charge() -> Any:
        return _run(site), 201

    return Case(site)


def _csrf(make_site: MakeSite) -> Case:
    wtf = pytest.importorskip("flask_wtf.csrf")
    app = Flask("shop")
    app.secret_key = "secret"
    app.config["WTF_CSRF_SSL_STRICT"] = False
    wtf.CSRFProtect(app)
    site = make_site(app=app)
    app.add_url_rule("/token", "token", wtf.generate_csrf)
    _add(site)
    client = app.test_client()
    token = client.get("/token").text
    return Case(site, client=client, headers=[("X-CSRFToken", token)])


CASES: dict[str, Callable[[MakeSite], Case]] = {
    "Flask-RESTX": _restx,
    "Flask-RESTX, method_decorators": _restx_whole,
    "flask-restful": _restful,
    "flask-smorest": _smorest,
    "APIFlask": _apiflask,
    "flask-login": _login,
    "flask-jwt-extended": _jwt,
    "SQLAlchemy": _sqlalchemy,
    "Flask-Compress": _compress,
    "Flask-CORS": _cors,
    "Flask-Limiter": _limiter,
    "Flask-WTF": _csrf,
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, make_site: MakeSite) -> Case:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the extensions themselves
        return CASES[request.param](make_site)


def _body(answer: TestResponse) -> Any:
    if answer.headers.get("Content-Encoding") == "gzip":
        return Response(gzip.decompress(answer.data), mimetype="application/json").get_json()
    return answer.get_json()


@pytest.mark.filterwarnings("ignore")
def test_a_first_run_and_its_replay_are_the_same(case: Case) -> None:
    first, again = case.send(), case.send()
    assert first.status_code == again.status_code == 201
    body = _body(first)
    assert body.get("data", body) == {"id": 1, "amount": 1000}
    assert _body(again) == body
    assert ("Idempotent-Replayed" in first.headers, again.headers["Idempotent-Replayed"]) == (False, "true")
    assert case.site.runs == [KEY]
    for name in ("Content-Encoding", "Access-Control-Allow-Origin", "Content-Type", "X-RateLimit-Limit"):
        assert again.headers.getlist(name) == first.headers.getlist(name)


@pytest.mark.filterwarnings("ignore")
def test_a_reused_key_and_a_missing_one_are_refused_as_they_are(case: Case) -> None:
    case.send()
    reused, missing = case.send(amount=2), case.send(None)
    assert (reused.status_code, _body(reused)["error"]) == (409, "idempotency_key_reused")
    assert (missing.status_code, _body(missing)["error"]) == (400, "idempotency_key_required")
    assert case.site.runs == [KEY]


@pytest.mark.filterwarnings("ignore")
def test_nobody_has_no_keys_with_an_extension_that_authenticates(make_site: MakeSite) -> None:
    for make in (_login, _jwt):
        case = make(make_site)
        assert case.send(headers=[]).status_code == 401
        assert case.site.sent == []


@pytest.mark.filterwarnings("ignore")
def test_a_commit_of_sqlalchemy_that_fails_is_not_replayed_as_a_success(make_site: MakeSite) -> None:
    sqlalchemy, orm = pytest.importorskip("sqlalchemy"), pytest.importorskip("sqlalchemy.orm")
    engine = _sqlite()
    session = orm.scoped_session(orm.sessionmaker(engine))
    site = make_site()
    fail = [True]

    @sqlalchemy.event.listens_for(session, "before_commit")
    def refuse(_: Any) -> None:
        if fail:
            fail.pop()
            raise sqlalchemy.exc.OperationalError("commit", {}, Exception("the disk is full"))

    @site.app.teardown_appcontext
    def commit(error: BaseException | None) -> None:
        if g.get("used"):
            session.commit()
        session.remove()

    def view() -> Any:
        g.used = True
        session.execute(sqlalchemy.text("select 1"))
        return jsonify(run=len(site.runs)), 201

    site.view(view)
    with pytest.raises(sqlalchemy.exc.OperationalError):
        site.send()
    assert site.send().get_json() == {"run": 2}
    assert site.send().get_json() == {"run": 2}


@pytest.mark.filterwarnings("ignore")
def test_a_limit_that_is_reached_is_not_replayed(make_site: MakeSite) -> None:
    limiter, util = pytest.importorskip("flask_limiter"), pytest.importorskip("flask_limiter.util")
    app = Flask("shop")
    limits = limiter.Limiter(util.get_remote_address, app=app, storage_uri="memory://")
    site = make_site(app=app)

    @app.post("/charges")
    @site.idempotency.protect
    @limits.limit("1/minute")
    def charge() -> Any:
        return _run(site), 201

    assert [site.send(key).status_code for key in ("k1", "k2", "k2", "k1")] == [201, 429, 429, 201]
    assert site.row("k2")["owner"] == b""
